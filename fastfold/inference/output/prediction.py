"""``Prediction``: a predicted structure with its confidence, and its files."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from fastfold._version import __version__
from fastfold.data.targets import safe_stem
from fastfold.errors import ConfigError, OutputError
from fastfold.inference.config import OutputFormat
from fastfold.inference.output import score_files
from fastfold.inference.output.file_names import COLABFOLD_SCORES, file_name, prediction_key, sample_label
from fastfold.inference.output.plots import confidence_png
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import PdbLimitError, to_pdb
from fastfold.protein.labels import AuthorNames, default_names, residue_ranges, shifted_numbers
from fastfold.protein.metrics.interface import ChainConfidence, interface_scores, without_scores
from fastfold.protein.protein import Protein, check_writable, convert_arrays
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic
from fastfold.utils.lazy import old_methods
from fastfold.utils.transliteration import to_ascii

if TYPE_CHECKING:
    from fastfold.protein.validation import StructureCheck

MAX_CIF_PAE_RESIDUES = 400
"""Longest targets in residues whose mmCIF files have the aligned errors by default; 6 MB a file."""

_log = logging.getLogger(__name__)


def multimer_confidence(ptm: float, iptm: float) -> float:
    """Compute AlphaFold-Multimer's ranking confidence, 0 to 1 (Evans et al., 2021)."""
    return 0.8 * iptm + 0.2 * ptm


def run_details(model_name: str, seed: int, num_recycles: int | None) -> str:
    """Describe the run of a network in a structure file."""
    return f"network {model_name}, seed {seed}, {num_recycles} recycles"


def prediction_title(name: str, model_name: str) -> str:
    """Return the title of a prediction's files and plots, in printable ASCII."""
    title = to_ascii(f"Predicted structure of {name[:100]} by {model_name[:100]}")
    return re.sub(r"[^ -~]", "?", title)


class Recycle(NamedTuple):
    """Structure after one pass of the network."""

    atom_positions: np.ndarray  #: ``[N, 37, 3]`` float32, in Å
    plddt: np.ndarray  #: ``[N]`` float32, 0 to 100


@old_methods({"view": "fastfold:view", "relax": "fastfold:relax_prediction"})
@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """Predicted structure of ``N`` residues, as arrays and plain values.

    Arrays are converted to the dtypes below, without a copy if they have them already.

    Raises:
        ValueError: Shapes disagree, or ``pae`` is given without ``max_pae``.

    Example:
        >>> import fastfold
        >>> files = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).save("results", rank=1)
        >>> prediction = fastfold.Prediction.load("results", "query")
        >>> prediction.sequences, prediction.pae.shape, prediction.protein.atom_positions.shape
        (('MTYKLILNGK',), (10, 10), (10, 37, 3))
    """

    name: str  #: Name of the target; converted to a safe form in file names
    sequences: tuple[str, ...]  #: One-letter sequence of each folded chain
    model_name: str  #: Network, for example ``model_1_ptm``
    seed: int  #: Random seed
    num_recycles: int  #: Recycles that were run (multimer networks may stop early)
    aatype: np.ndarray  #: ``[N]`` int32, 0-20
    #: ``[N]`` int32, residue index of the network: the place in the whole protein from 0
    residue_index: np.ndarray
    chain_index: np.ndarray  #: ``[N]`` int32: 0, ..., 0, 1, ..., 1, and so on
    atom_positions: np.ndarray  #: ``[N, 37, 3]`` float32, in Å
    atom_mask: np.ndarray  #: ``[N, 37]`` float32; unknown residues (X) are without atoms
    plddt: np.ndarray  #: ``[N]`` float32, 0 to 100
    #: ``[N, N]`` float32 in Å, error at residue j when aligned on i; None without that head
    pae: np.ndarray | None = None
    max_pae: float | None = None  #: Largest error that the network can predict, in Å; required with ``pae``
    ptm: float | None = None  #: Predicted TM-score, 0 to 1
    iptm: float | None = None  #: Predicted interface TM-score, 0 to 1; None for single chains
    #: ``single [N, c_s]``, ``pair [N, N, c_z]`` and ``structure_module [N, c]``, float32, if requested
    representations: Mapping[str, np.ndarray] | None = None
    #: Of CB distances ``probabilities [N, N, bins]`` float16 and ``bin_edges [bins - 1]`` in Å; None unless requested
    distogram: Mapping[str, np.ndarray] | None = None
    recycles: tuple[Recycle, ...] = ()  #: Structure after each pass, if requested
    #: Confidences of the chains of a complex; None for single chains and networks without aligned errors
    chain_confidence: ChainConfidence | None = None
    #: Per chain, the templates used by the network, and reasons why others were left out; None if the network uses
    #: none or none were requested
    templates: tuple[Mapping[str, Any], ...] | None = None
    is_multimer: bool = False  #: True for a network of AlphaFold-Multimer's kind
    #: True to write ``pae`` into mmCIF files too; None for at most :data:`MAX_CIF_PAE_RESIDUES` residues
    cif_pae: bool | None = None
    #: Restraints before and after their fit, in JSON's types
    #: (:meth:`fastfold.inference.restraints.RestraintReport.to_json`); None without any
    restraints: Mapping[str, Any] | None = None
    #: Deviations from each forced template, in JSON's types; empty without any
    forced_templates: tuple[Mapping[str, Any], ...] = ()
    #: Scores against the structure that was scored (:func:`fastfold.inference.folding.compare.compare_with_given`);
    #: None if the target was folded
    given_structure: Mapping[str, Any] | None = None
    #: Method, number and values of the sample, in JSON's types
    #: (:attr:`fastfold.inference.sampling.samples.Sample.record`); None without sampling
    sample: Mapping[str, Any] | None = None
    #: Reason why a complex has no interface scores; None if it has them
    no_interface_scores: str | None = None
    #: Names of chains and residues in files; None for A, B, ... and places in the whole proteins from 1
    names: AuthorNames | None = None

    def __post_init__(self) -> None:
        n = len(self.aatype)
        layout: dict[str, tuple[type, tuple[int, ...]]] = {
            "aatype": (np.int32, (n,)),
            "residue_index": (np.int32, (n,)),
            "chain_index": (np.int32, (n,)),
            "atom_positions": (np.float32, (n, rc.atom_type_num, 3)),
            "atom_mask": (np.float32, (n, rc.atom_type_num)),
            "plddt": (np.float32, (n,)),
        }
        if self.pae is not None:
            layout["pae"] = (np.float32, (n, n))
            if self.max_pae is None:
                raise ValueError(
                    "Prediction.pae needs max_pae, the largest error that the network can predict"
                )
        convert_arrays(self, layout)
        object.__setattr__(self, "sequences", tuple(self.sequences))
        lengths = [chain.stop - chain.start for chain in self.protein.chains]
        if (sizes := list(map(len, self.sequences))) != lengths:
            raise ValueError(
                f"Prediction.sequences have lengths {sizes}, the chains of chain_index {lengths}"
            )

    @cached_property
    def protein(self) -> Protein:
        """Structure with pLDDT as the B-factor of each atom.

        Residues are numbered as in the whole protein from 1. Those of a given structure have its numbers, as far as
        they rise with the residue index.
        """
        return self.with_atoms(self.atom_positions, self.plddt)

    @cached_property
    def author_names(self) -> AuthorNames:
        """Names of chains and residues in files."""
        return self.names or default_names(self.protein)

    def with_atoms(self, atom_positions: np.ndarray, plddt: np.ndarray) -> Protein:
        """Return the structure with other atoms ``[N, 37, 3]`` in Å and pLDDT ``[N]``, such as those of a recycle."""
        return Protein(
            atom_positions=atom_positions,
            atom_mask=self.atom_mask,
            aatype=self.aatype,
            residue_index=self._numbers,
            chain_index=self.chain_index,
            b_factors=plddt[:, None] * (self.atom_mask > 0.5),
        )

    @cached_property
    def _numbers(self) -> np.ndarray:
        if self.names is None:
            return self.residue_index + 1
        starts = np.flatnonzero(np.diff(self.chain_index, prepend=-1))
        parts = zip(np.split(self.residue_index, starts[1:]), starts.tolist(), strict=True)
        return np.concatenate([shifted_numbers(part, self.names.numbers[start]) for part, start in parts])

    def __repr__(self) -> str:
        """Return three lines: target, network, and scores."""
        chains = f"{len(self.sequences)} chain{'s' if len(self.sequences) > 1 else ''}"
        scores = [f"pLDDT {self.mean_plddt:.1f}"]
        scores += [f"{name} {s:.2f}" for name, s in (("pTM", self.ptm), ("ipTM", self.iptm)) if s is not None]
        return (
            f"Prediction of {self.name}: {len(self.aatype):,} residues, {chains}\n"
            f"by {self.model_name}, seed {self.seed}, {self.num_recycles} recycles\n{', '.join(scores)}"
        )

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: the three lines and the plot."""
        png = base64.b64encode(confidence_png(**self.plot_arguments())).decode("ascii")
        return (
            f"<pre>{html.escape(repr(self))}</pre>"
            f'<img alt="pLDDT and aligned error" style="max-width: 100%" src="data:image/png;base64,{png}">'
        )

    @property
    def mean_plddt(self) -> float:
        """Mean pLDDT of all residues, 0 to 100."""
        return float(np.mean(self.plddt, dtype=np.float64))

    @cached_property
    def interface_scores(self) -> dict[str, Any]:
        """Scores of chains and pairs (:func:`fastfold.protein.metrics.interface.scores.interface_scores`)."""
        scores = interface_scores(
            self.chain_index,
            self.atom_positions,
            self.atom_mask,
            self.plddt,
            pae=self.pae,
            confidence=self.chain_confidence,
            names=self.author_names.chain_ids,
        )
        reason = self.no_interface_scores
        return scores if reason is None else without_scores(scores, reason)

    @cached_property
    def structure_check(self) -> StructureCheck:
        """Geometry of the structure against that of proteins."""
        from fastfold.protein.validation import check_structure

        return check_structure(self.protein)

    @property
    def residue_ranges(self) -> list[list[list[int]]]:
        """Per chain, first and last number of its parts."""
        numbers = self.protein.residue_index
        return [residue_ranges(numbers[chain]) for chain in self.protein.chains]

    @property
    def ranking_confidence(self) -> float:
        """AlphaFold's ranking score: 0.8 ipTM + 0.2 pTM (0 to 1), without ipTM the mean pLDDT.

        Only predictions of the same kind of network are comparable. Ranks also depend on clashes between chains
        (:func:`fastfold.inference.output.writer.ranking_scores`).
        """
        if self.iptm is not None and self.ptm is not None:
            return multimer_confidence(float(self.ptm), float(self.iptm))
        return self.mean_plddt

    def to_pdb(self) -> str:
        """Format the structure as a PDB file, with pLDDT in the B-factor column.

        Raises:
            OutputError: The structure has no atoms, or a value is not finite.
            PdbLimitError: The structure exceeds the PDB format; use :meth:`to_mmcif`.
        """
        return to_pdb(self.protein, title=f"{self.title}; pLDDT in the B-factor column", names=self.names)

    def to_mmcif(self) -> str:
        """Format the structure as ModelCIF, with pLDDT in the B-factor column and as quality metric.

        ``cif_pae`` tells if the aligned error is a metric of all pairs, with two decimals.

        Raises:
            OutputError: The structure has no atoms, or a value is not finite.
        """
        return to_modelcif(
            self.protein, software_version=__version__, names=self.names, **self.modelcif_arguments()
        )

    def modelcif_arguments(self) -> dict[str, Any]:
        """Return what :func:`fastfold.protein.io.modelcif_writer.to_modelcif` tells about a prediction."""
        is_short = self.cif_pae is None and len(self.aatype) <= MAX_CIF_PAE_RESIDUES
        return {
            "entry_id": self.name,
            "title": self.title,
            "model_name": self.model_name,
            "is_multimer": self.is_multimer,
            "plddt": self.plddt,
            "pae": self.pae if is_short or self.cif_pae else None,
            "ptm": self.ptm,
            "iptm": self.iptm,
            "details": run_details(self.model_name, self.seed, self.num_recycles),
        }

    @property
    def title(self) -> str:
        """Title of files and plots."""
        return prediction_title(self.name, self.model_name)

    @classmethod
    def load(cls, folder: str | Path, name: str | None = None, *, rank: int = 1) -> Prediction:
        """Read a prediction of a folder of results; see :func:`fastfold.inference.output.load.read_prediction`."""
        from fastfold.inference.output.load import read_prediction

        return cls(**read_prediction(folder, name, rank=rank))

    def to_biopython(self) -> Any:
        """Return a ``Bio.PDB`` structure; see :func:`fastfold.protein.objects.write.to_biopython`."""
        from fastfold.protein.objects.write import to_biopython

        return to_biopython(self, self.name)

    def to_biotite(self) -> Any:
        """Return a Biotite ``AtomArray``; see :func:`fastfold.protein.objects.write.to_biotite`."""
        from fastfold.protein.objects.write import to_biotite

        return to_biotite(self)

    def to_mdanalysis(self) -> Any:
        """Return an MDAnalysis ``Universe``; see :func:`fastfold.protein.objects.write.to_mdanalysis`."""
        from fastfold.protein.objects.write import to_mdanalysis

        return to_mdanalysis(self)

    def scores(self) -> dict[str, Any]:
        """Return the content of the scores file: plain numbers, text and lists.

        pLDDT has two decimals, all others four, absent scores are None. Values that are not finite do not raise here,
        but in :meth:`save`.
        """
        ranges = self.residue_ranges
        is_whole = ranges == [[[1, len(sequence)]] for sequence in self.sequences]
        labels = score_files.residue_labels(self.author_names, self.protein)
        scored, forced = self.given_structure, [dict(one) for one in self.forced_templates]
        return {
            "schema_version": score_files.SCHEMA_VERSION,
            "name": self.name,
            "model": self.model_name,
            "is_multimer": self.is_multimer,
            "seed": int(self.seed),
            **({} if self.sample is None else {"sample": dict(self.sample)}),
            "num_recycles": int(self.num_recycles),
            "chain_ids": list(self.author_names.chain_ids),
            "sequences": list(self.sequences),
            **({} if is_whole else {"residue_ranges": ranges}),
            **({} if labels is None else {"residue_labels": labels}),
            "mean_plddt": score_files.rounded(self.mean_plddt, 2),
            "ptm": score_files.rounded(self.ptm, 4),
            "iptm": score_files.rounded(self.iptm, 4),
            "ranking_confidence": score_files.rounded(self.ranking_confidence, 4),
            "max_pae": score_files.rounded(self.max_pae, 4),
            "interfaces": score_files.rounded_tree(self.interface_scores, 4),
            "geometry": self.structure_check.to_dict(),
            **({} if self.templates is None else {"templates": [dict(chain) for chain in self.templates]}),
            **({} if self.restraints is None else {"restraints": dict(self.restraints)}),
            **({"forced_templates": forced} if forced else {}),
            **({} if scored is None else {"given_structure": score_files.rounded_tree(dict(scored), 4)}),
            "plddt": score_files.rounded(self.plddt, 2),
        }

    def save(
        self,
        directory: str | Path,
        *,
        rank: int | None = None,
        plots: bool = True,
        settings: Mapping[str, Any] | None = None,
        output_format: OutputFormat = "fastfold",
    ) -> dict[str, Path]:
        """Write the files of :meth:`files`, each atomically.

        The names are ``<name>_rank_00i_<model>_seed_n`` (without a rank: ``<name>_<model>_seed_n``) plus the ending.
        All contents are made before the first file is written, so an invalid prediction leaves no files.

        Args:
            directory: Output folder; created if missing.
            rank: Rank among the predictions of the same target, from 1.
            plots: Draw the plot.
            settings: Settings of the run, in JSON's types; written with FastFold's version.
            output_format: ``colabfold`` for the names of ColabFold's files, and its scores file as well.

        Returns:
            Paths by kind: ``pdb`` (unless the structure exceeds the format), ``cif``, ``scores``, ``pae`` (if kept),
            ``plot`` (if requested), ``config`` (if settings are given) and ``colabfold`` (its scores file).

        Raises:
            ConfigError: The rank is not a whole number from 1, or the format is unknown.
            OutputError: A value is not finite, the structure has no atoms, or a file cannot be written.
        """
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ConfigError(f"rank must be a whole number from 1, found {rank!r}")
        if output_format not in get_args(OutputFormat):
            raise ConfigError(
                f"output_format must be one of {', '.join(get_args(OutputFormat))}, found {output_format!r}"
            )
        contents = self.files(plots=plots, output_format=output_format)
        if settings is not None:
            config = {"fastfold_version": __version__, "settings": dict(settings)}
            contents["_config.json"] = score_files.lines_json(config)
        stem, key = safe_stem(self.name), self.file_key(output_format)
        folder, paths = prepare_output_directory(directory), {}
        for ending, content in contents.items():
            kind = "plot" if ending == ".png" else ending.lstrip("_.").partition(".")[0]
            paths[kind] = folder / file_name(stem, rank, key, ending, output_format)
            write_atomic(paths[kind], content)
        return paths

    @property
    def key(self) -> str:
        """Network, seed and sample as in file names: ``model_1_ptm_seed_0``."""
        return self.file_key()

    def file_key(self, output_format: OutputFormat = "fastfold") -> str:
        """Return network, seed and sample in a style of file names."""
        return prediction_key(self.model_name, int(self.seed), output_format, sample=self.sample_label)

    @property
    def sample_label(self) -> str | None:
        """Method and number of the sample as in file names, ``columns_003``; None without sampling."""
        return None if self.sample is None else sample_label(self.sample)

    def files(
        self, *, plots: bool = True, output_format: OutputFormat = "fastfold"
    ) -> dict[str, str | bytes]:
        """Return the contents of the prediction's files by the ending of their names.

        ``.pdb`` (if the structure exceeds the format, a log line says so), ``.cif``, ``_scores.json``, ``_pae.json``,
        ``.png``, ``_representations.npz``, ``_distogram.npz``, ``_colabfold.json`` (in that format), and ``_r0.pdb``,
        ``_r1.pdb`` and so on for the passes of the network. Equal predictions give equal bytes.

        Raises:
            OutputError: A value is not finite, or the structure has no atoms.
        """
        self._check_finite()
        contents: dict[str, str | bytes] = {}
        try:
            contents[".pdb"] = self.to_pdb()
        except PdbLimitError as error:
            _log.warning("%s: no PDB file is written: %s", self.name[:100], error)
        contents[".cif"] = self.to_mmcif()
        contents["_scores.json"] = score_files.lines_json(self.scores())
        if self.pae is not None and self.max_pae is not None:
            contents["_pae.json"] = score_files.pae_json(self.pae, self.max_pae)
        if output_format == "colabfold":
            contents[COLABFOLD_SCORES] = score_files.colabfold_json(
                self.plddt, pae=self.pae, ptm=self.ptm, iptm=self.iptm
            )
        if plots:
            contents[".png"] = confidence_png(**self.plot_arguments())
        for kind, arrays in (("representations", self.representations), ("distogram", self.distogram)):
            if arrays is not None:
                file = io.BytesIO()
                np.savez(file, **dict(arrays))  # type: ignore[arg-type]
                contents[f"_{kind}.npz"] = file.getvalue()
        for number, recycle in enumerate(self.recycles):
            with contextlib.suppress(PdbLimitError):
                contents[f"_r{number}.pdb"] = to_pdb(self.with_atoms(*recycle), names=self.names)
        return contents

    def _check_finite(self) -> None:
        """Refuse values that are not finite or out of range, also of residues without atoms."""
        check_writable(self.protein)
        values = {
            "pLDDT": self.plddt,
            "PAE": self.pae,
            "max PAE": self.max_pae,
            "pTM": self.ptm,
            "ipTM": self.iptm,
        }
        for label, value in values.items():
            if value is not None and not np.isfinite(value).all():
                raise OutputError(
                    f"{label} of {self.name[:100]} is not finite: the prediction failed and is not written; "
                    "try `precision=fp32` and check the weights"
                )
        pae, limit = self.pae, 1.001 * (self.max_pae or 0)
        if pae is not None and not (pae.min() >= 0 and pae.max() <= limit):
            raise OutputError(
                f"PAE of {self.name[:100]} ranges over {pae.min():.2f}..{pae.max():.2f} Å, outside of "
                f"0..{self.max_pae} Å: it does not come from this network's error bins and is not written"
            )

    def plot_arguments(self) -> dict[str, Any]:
        """Return the arguments of :func:`fastfold.inference.output.plots.confidence_png` for the plot."""
        return {
            "plddt": self.plddt,
            "chain_index": self.chain_index,
            "names": self.author_names,
            "numbers": self.protein.residue_index,
            "pae": self.pae,
            "max_pae": self.max_pae,
            "title": self.title,
            "ptm": self.ptm,
            "iptm": self.iptm,
        }
