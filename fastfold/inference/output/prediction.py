"""``Prediction``: one structure that a network predicted, with its confidence, and how it goes to disk."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fastfold._version import __version__
from fastfold.data.targets import safe_stem
from fastfold.errors import OutputError
from fastfold.inference.output import json_files as score_files
from fastfold.inference.output.plots import confidence_png
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import PdbLimitError, to_pdb
from fastfold.protein.metrics.interface import ChainConfidence, interface_scores
from fastfold.protein.protein import Protein, chain_name, check_writable
from fastfold.utils.atomic_files import prepare_output_directory, write_atomic

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prediction:
    """One predicted structure of ``N`` residues, as plain values.

    Arrays are converted to the types below, without a copy where they have them already.

    Attributes:
        name: Name of the target; made safe where a file is called after it.
        sequences: One-letter sequence of each chain, as it was folded.
        model_name: Network, ``model_1_ptm`` for example.
        seed: Seed of everything random.
        num_recycles: Recycles that were run (multimer networks may stop early).
        aatype: ``[N]`` int32, 0-20.
        residue_index: ``[N]`` int32, as the network saw it: from 0 in each chain.
        chain_index: ``[N]`` int32: 0, ..., 0, 1, ..., 1, and so on.
        atom_positions: ``[N, 37, 3]`` float32, in Å.
        atom_mask: ``[N, 37]`` float32; unknown residues (X) have no atoms.
        plddt: ``[N]`` float32, 0 to 100.
        pae: ``[N, N]`` float32 in Å, error at residue j when aligned on i; None without that head.
        max_pae: Largest error that the network can state, in Å; given if ``pae`` is.
        ptm: Predicted TM-score, 0 to 1.
        iptm: Predicted interface TM-score, 0 to 1; None for monomer networks.
        chain_confidence: What the network says of the chains of a complex; None for monomer networks.

    Raises:
        ValueError: Shapes disagree, or ``pae`` comes without ``max_pae``.
    """

    name: str
    sequences: tuple[str, ...]
    model_name: str
    seed: int
    num_recycles: int
    aatype: np.ndarray
    residue_index: np.ndarray
    chain_index: np.ndarray
    atom_positions: np.ndarray
    atom_mask: np.ndarray
    plddt: np.ndarray
    pae: np.ndarray | None = None
    max_pae: float | None = None
    ptm: float | None = None
    iptm: float | None = None
    chain_confidence: ChainConfidence | None = None

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
                raise ValueError("Prediction.pae needs max_pae, the largest error that the network can state")
        for field, (dtype, shape) in layout.items():
            array: np.ndarray = np.asarray(getattr(self, field), dtype)
            if array.shape != shape:
                raise ValueError(f"Prediction.{field} has shape {list(array.shape)}, expected {list(shape)}")
            object.__setattr__(self, field, array)
        object.__setattr__(self, "sequences", tuple(self.sequences))
        lengths = [chain.stop - chain.start for chain in self.protein.chains]
        if [len(sequence) for sequence in self.sequences] != lengths:
            raise ValueError(
                f"Prediction.sequences have lengths {[len(sequence) for sequence in self.sequences]}, the "
                f"chains of chain_index {lengths}"
            )

    @cached_property
    def protein(self) -> Protein:
        """The structure, residues numbered from 1, pLDDT as the B-factor of each atom."""
        return Protein(
            atom_positions=self.atom_positions,
            atom_mask=self.atom_mask,
            aatype=self.aatype,
            residue_index=self.residue_index + 1,
            chain_index=self.chain_index,
            b_factors=self.plddt[:, None] * (self.atom_mask > 0.5),
        )

    @property
    def mean_plddt(self) -> float:
        """Mean pLDDT of all residues, 0 to 100."""
        return float(np.mean(self.plddt, dtype=np.float64))

    @cached_property
    def interface_scores(self) -> dict[str, Any]:
        """Scores of the chains and of every pair of them: ipSAE, pDockQ, LIS, ipTM, actifpTM and others.

        See :func:`fastfold.protein.metrics.interface.scores.interface_scores`.
        """
        return interface_scores(
            self.chain_index,
            self.atom_positions,
            self.atom_mask,
            self.plddt,
            pae=self.pae,
            confidence=self.chain_confidence,
        )

    @property
    def ranking_confidence(self) -> float:
        """The number by which AlphaFold ranks: 0.8 ipTM + 0.2 pTM (0 to 1), without ipTM the mean pLDDT.

        Only predictions of the same kind of network compare.
        """
        if self.iptm is not None and self.ptm is not None:
            return 0.8 * float(self.iptm) + 0.2 * float(self.ptm)
        return self.mean_plddt

    def to_pdb(self) -> str:
        """The structure as a PDB file, pLDDT in the B-factor column.

        Raises:
            OutputError: There are no atoms, or a value is not finite.
            PdbLimitError: The structure does not fit into a PDB file; :meth:`to_mmcif` holds it.
        """
        return to_pdb(self.protein, title=f"{self._title}; pLDDT in the B-factor column")

    def to_mmcif(self) -> str:
        """The structure as ModelCIF, pLDDT in the B-factor column and as quality metric.

        The aligned error is not in it: that would be N² rows; :meth:`save` writes it to a file of its own.

        Raises:
            OutputError: There are no atoms, or a value is not finite.
        """
        return to_modelcif(
            self.protein,
            entry_id=self.name,
            title=self._title,
            software_version=__version__,
            model_name=self.model_name,
            plddt=self.plddt,
            ptm=self.ptm,
            iptm=self.iptm,
            details=f"network {self.model_name}, seed {self.seed}, {self.num_recycles} recycles",
        )

    @property
    def _title(self) -> str:
        title = f"Predicted structure of {self.name[:100]} by {self.model_name[:100]}"
        return re.sub(r"[^ -~]", "?", title)

    def scores(self) -> dict[str, Any]:
        """What the scores file holds: plain numbers, text and lists.

        pLDDT has two decimals, all others four, absent scores are None. Raises nothing for values that are
        not finite; :meth:`save` does.
        """
        return {
            "schema_version": score_files.SCHEMA_VERSION,
            "name": self.name,
            "model": self.model_name,
            "seed": int(self.seed),
            "num_recycles": int(self.num_recycles),
            "chain_ids": [chain_name(i) for i in range(len(self.sequences))],
            "sequences": list(self.sequences),
            "mean_plddt": score_files.rounded(self.mean_plddt, 2),
            "ptm": score_files.rounded(self.ptm, 4),
            "iptm": score_files.rounded(self.iptm, 4),
            "ranking_confidence": score_files.rounded(self.ranking_confidence, 4),
            "max_pae": score_files.rounded(self.max_pae, 4),
            "interfaces": score_files.rounded_tree(self.interface_scores, 4),
            "plddt": score_files.rounded(self.plddt, 2),
        }

    def save(
        self,
        directory: str | Path,
        *,
        rank: int | None = None,
        plots: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, Path]:
        """Writes structure, scores, aligned error and a plot, each file atomically.

        Everything is made in memory before the first file is written, so a prediction that cannot be written
        leaves nothing. Files are called ``<name>_rank_00i_<model>_seed_n`` (without a rank:
        ``<name>_<model>_seed_n``) plus ``.pdb``, ``.cif``, ``_scores.json``, ``_pae.json``, ``.png`` and
        ``_config.json``. A structure that does not fit into a PDB file is written as ``.cif`` only, and the log
        says so. The same prediction always gives the same bytes.

        Args:
            directory: The folder; created if it is not there.
            rank: Place among the predictions of the same target, from 1.
            plots: Whether to draw the plot.
            settings: Settings of the run, in JSON's types; written with FastFold's version.

        Returns:
            The paths by kind: ``pdb`` (unless it does not fit), ``cif``, ``scores``, ``pae`` (if there is
            one), ``plot`` (if asked for) and ``config`` (if settings were given).

        Raises:
            OutputError: A value is not finite, there are no atoms, or a file cannot be written.
        """
        self._check_finite()
        name = safe_stem(self.name)
        middle = "" if rank is None else f"_rank_{rank:03d}"
        stem = f"{name}{middle}_{safe_stem(self.model_name)}_seed_{int(self.seed)}"

        contents: dict[str, tuple[str, str | bytes]] = {}
        try:
            contents["pdb"] = (".pdb", self.to_pdb())
        except PdbLimitError as error:
            _log.warning("%s: no PDB file is written: %s", self.name[:100], error)
        contents["cif"] = (".cif", self.to_mmcif())
        contents["scores"] = ("_scores.json", score_files.lines_json(self.scores()))
        if self.pae is not None and self.max_pae is not None:
            contents["pae"] = ("_pae.json", score_files.pae_json(self.pae, self.max_pae))
        if plots:
            png = confidence_png(
                self.plddt,
                self.chain_index,
                pae=self.pae,
                max_pae=self.max_pae,
                title=self._title,
                ptm=self.ptm,
                iptm=self.iptm,
            )
            contents["plot"] = (".png", png)
        if settings is not None:
            config = {
                "fastfold_version": __version__,
                "settings": dict(settings),
            }
            contents["config"] = ("_config.json", score_files.lines_json(config))

        folder = prepare_output_directory(directory)
        paths = {kind: folder / f"{stem}{suffix}" for kind, (suffix, _) in contents.items()}
        for kind, (_, data) in contents.items():
            write_atomic(paths[kind], data)
        return paths

    def _check_finite(self) -> None:
        """Refuses values that no file should hold, pLDDT and PAE of residues without atoms included."""
        check_writable(self.protein)
        values = {
            "pLDDT": self.plddt,
            "PAE": self.pae,
            "max PAE": self.max_pae,
            "pTM": self.ptm,
            "ipTM": self.iptm,
        }
        for label, value in values.items():
            if value is None:
                continue
            if not np.isfinite(value).all():
                raise OutputError(
                    f"{label} of {self.name[:100]} is not finite: the prediction failed and is not written; "
                    "try --precision fp32 and check the weights"
                )
        if self.pae is not None and not (
            self.pae.min() >= 0 and self.pae.max() <= 1.001 * (self.max_pae or 0)
        ):
            raise OutputError(
                f"PAE of {self.name[:100]} lies in {self.pae.min():.2f}..{self.pae.max():.2f} Å, outside "
                f"0..{self.max_pae} Å: it does not come from this network's error bins and is not written"
            )
