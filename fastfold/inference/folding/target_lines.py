"""Lines about a target for users: its inputs, its result, and its comparison with an experiment."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from fastfold.data.msa.find import ChainMsas, unread_files
from fastfold.data.msa.other_files import READABLE
from fastfold.data.targets import Target, safe_stem
from fastfold.errors import InputError
from fastfold.inference.config import InferConfig, OutputFormat
from fastfold.inference.folding.prediction import keeps_pae
from fastfold.inference.models import Network
from fastfold.inference.output.results_folder import PredictionRecord, TargetResults
from fastfold.inference.output.score_files import lines_json, rounded, rounded_tree
from fastfold.inference.progress import Progress
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import COMPARISON, ObservedStructure, read_logged
from fastfold.protein.io.read import named_protein, read_structure
from fastfold.protein.metrics.compare import StructureScores, compare_structures
from fastfold.utils.atomic_files import write_atomic

SCHEMA_VERSION = 1
ReferenceKind = Literal[
    "experiment", "model", "structure"
]  #: Kinds of references; ``structure`` if the file names no method
BACKBONE = ("N", "CA", "C", "O")  #: Atoms of a reference that its file of scores has
_EXPERIMENTS = (
    "x-ray",
    "electron",
    "nmr",
    "neutron",
    "diffraction",
    "scattering",
    "microscopy",
    "epr",
    "fluorescence",
)
_MODELS = ("theoretical", "predicted", "computational")
_SHOWN = 3  #: Number of files that are named
_ENDINGS = (".cif", ".mmcif", ".pdb", ".ent")


def find_reference(reference: Path, name: str) -> Path | None:
    """Return a target's experimental structure: a file, or ``<target>.pdb`` (``.cif``, ``.gz``) of a folder.

    None if a folder has none of that name. An InputError tells that ``reference`` does not exist.
    """
    if reference.is_file():
        return reference
    if not reference.is_dir():
        raise InputError("no such file or folder; check the name given with `reference`", path=reference)
    paths = (reference / f"{name}{ending}{packed}" for ending in _ENDINGS for packed in ("", ".gz"))
    return next(filter(Path.is_file, paths), None)


def compare_target(
    output: Path, name: str, reference: Path, output_format: OutputFormat = "fastfold"
) -> tuple[dict[str, StructureScores], str]:
    """Compare written predictions of a target with a structure; return scores, best first, or why there are none.

    ``<target>_reference.json`` gets the reference's kind and backbone, and per prediction the fields of
    :class:`fastfold.protein.metrics.compare.StructureScores`; or ``not_comparable``, the reason, if the reference and
    the target do not share a residue. An InputError tells that the reference cannot be read, and an OutputError that
    the scores cannot be written.
    """
    true = read_logged(reference, COMPARISON, whole=True)
    stem = safe_stem(name)
    kinds = ("",) if output_format == "fastfold" else ("_unrelaxed", "_relaxed")
    structures = {
        path.stem: read_structure(path)
        for kind in kinds
        for path in sorted(output.glob(f"{glob.escape(stem)}{kind}_rank_*.cif"))
    }
    scores: dict[str, object] = {"schema_version": SCHEMA_VERSION, "name": name, "reference": reference.name}
    scores |= {"kind": _kind(true.method), "backbone": _backbone(true)}
    comparisons, reason = {}, ""
    try:
        comparisons = {key: compare_structures(structure, true) for key, structure in structures.items()}
    except InputError as error:
        reason = scores["not_comparable"] = str(error)
    for key, value in comparisons.items():
        plain = asdict(value)
        per_residue = plain.pop("lddt_ca_per_residue")
        plain["interfaces"] = list(plain["interfaces"])
        plain["reference_rows"] = [None if row < 0 else int(row) for row in plain.pop("reference_rows")]
        plain = rounded_tree(plain, 4)
        plain["lddt_ca_per_residue"] = [None if np.isnan(x) else rounded(x, 4) for x in per_residue]
        scores[key] = plain
    write_atomic(output / f"{stem}_reference.json", lines_json(scores))
    return comparisons, reason


def _kind(method: str) -> ReferenceKind:
    """Return the kind of a structure by the method that its file states."""
    if any(word in method for word in _EXPERIMENTS):
        return "experiment"
    return "model" if any(word in method for word in _MODELS) else "structure"


def _backbone(structure: ObservedStructure) -> list[list[list[float] | None]]:
    """Return N, CA, C and O of each residue in Å; None for an absent atom."""
    protein, _ = named_protein(structure)
    columns = [rc.atom_order[name] for name in BACKBONE]
    positions = np.round(protein.atom_positions[:, columns].astype(float), 2).tolist()
    present = (protein.atom_mask[:, columns] > 0.5).tolist()
    return [
        [xyz if is_there else None for xyz, is_there in zip(atoms, mask, strict=True)]
        for atoms, mask in zip(positions, present, strict=True)
    ]


def _without_alignment(target: Target, index: int, msa_dir: Path) -> str:
    chain = target.chains[index]
    what = repr(chain.record or target.record)
    if target.is_complex and not chain.record:
        what = f"chain {chain.id}"
    unread = [path.name for path in unread_files(msa_dir, target, chain)]
    not_read = f". Not read: {', '.join(unread[:_SHOWN])}; {READABLE}" if unread else ""
    return f"warning: {target.name}: no alignment of {what} in {msa_dir}; only its sequence is used{not_read}"


def announce(
    progress: Progress,
    target: Target,
    label: str,
    alignments: Sequence[ChainMsas],
    networks: Sequence[Network],
    config: InferConfig,
    *,
    msa_dir: Path | None,
) -> None:
    """Report the inputs of a target, named ``label``, its networks, and chains without an alignment in ``msa_dir``."""
    say, warn = progress.line, partial(progress.line, important=True)
    rows = [sum(len(msa.sequences) for group in pair for msa in group) for pair in alignments]
    for index, count in enumerate(rows):
        if msa_dir is not None and not target.has_alignment(index) and not count:
            warn(_without_alignment(target, index, msa_dir))
    evidence = f"{sum(rows):,} alignment rows" if any(rows) else "no alignment, from the sequence alone"
    is_fold = config.embed is None
    if is_fold and config.pae is None and not keeps_pae(target.num_residues, None):
        say(f"{label}: aligned errors of all pairs are left out of so long a target; `pae=yes` writes them")
    if target.is_complex and not all(network.info.multimer for network in networks):
        warn(
            f"warning: {target.name}: a monomer network folds this complex as one chain whose residue numbers "
            "jump by 200 between the chains; use `weights=multimer` for complexes ('fastfold weights download "
            "multimer' fetches it)"
        )
    names = ", ".join(network.name for network in networks)
    seeds = f", {len(config.seeds)} seeds" if len(config.seeds) > 1 else ""
    if target.seeds:
        seeds = (
            f", seed{'s' if len(target.seeds) > 1 else ''} {', '.join(map(str, target.seeds))} of the input"
        )
    if config.sample is not None:
        seeds += f", samples by {config.sample.method}"
    say(f"{label}: {target.num_residues:,} residues, {evidence}, by {names}{seeds}")


def count_of(records: Sequence[PredictionRecord]) -> str:
    """Return the networks of some results, and their number if it differs, in words."""
    networks = list(dict.fromkeys(str(record.scores.get("model")) for record in records))
    more = f" ({len(records)} embeddings)" if len(records) > len(networks) else ""
    return f"{', '.join(networks)}{more}"


def conclusion(records: Sequence[PredictionRecord]) -> str:
    """Return the scores of the best prediction of a target in words, from all records, the best first."""
    best = records[0]
    shown = ", ".join(
        f"{name} {best.scores[key]:.{digits}f}"
        for name, key, digits in (("pLDDT", "plddt", 1), ("pTM", "ptm", 2), ("ipTM", "iptm", 2))
        if best.scores.get(key) is not None
    )
    if best.scores.get("has_clash") is True:
        shown += ", its chains overlap"
    count = f"{len(records)} prediction{'s' if len(records) > 1 else ''}"
    return f"{shown} by {best.key}, best of {count}"


def report_geometry(progress: Progress, label: str, records: Sequence[PredictionRecord]) -> None:
    """Warn if the best structure of a target, as predicted, is not that of a protein."""
    geometry = records[0].scores.get("geometry", "ok")
    if geometry != "ok":
        progress.line(
            f"warning: {label}: the structure of {records[0].key} is not physical: {geometry}", important=True
        )


def report_comparison(
    progress: Progress, results: TargetResults, target: Target, label: str, reference: Path
) -> None:
    """Compare a target with its experimental structure in ``reference``, a file or folder, or raise InputError."""
    style = results.parent.style
    names = (target.shown_name, target.name)
    line = compare_in_folder(results.folder, results.stem, names, reference, label=label, output_format=style)
    progress.line(line, important=line.startswith("warning: "))


def compare_in_folder(
    folder: Path,
    stem: str,
    names: tuple[str, str],
    reference: Path,
    *,
    label: str,
    output_format: OutputFormat = "fastfold",
) -> str:
    """Compare a target's files with its structure in ``reference``, a file or folder; return a line about it.

    The line begins with ``warning: `` if the target lacks a structure that is comparable. ``names`` are those of the
    target, in its own letters and in plain ones.

    Raises:
        InputError: The structure cannot be read.
    """
    paths = (find_reference(reference, name) for name in dict.fromkeys(names) if "/" not in name)
    if (path := next((one for one in paths if one is not None), None)) is None:
        return f"warning: {names[1]}: no structure of this name in {reference}"
    scores, problem = compare_target(folder, stem, path, output_format)
    if problem:
        return f"warning: {names[1]}: not comparable with {path.name}: {problem}"
    if not scores:
        return f"warning: {names[1]}: no mmCIF file of a ranked prediction, which a comparison needs"
    best = next(iter(scores.values()))
    return (
        f"{label}: against {path.name}: TM-score {best.tm_score:.3f}, lDDT-CA {best.lddt_ca:.3f}, "
        f"GDT-TS {best.gdt_ts:.3f}, {best.aligned_residues} of {best.reference_residues} residues"
        f"{_about_chains(best)}"
    )


def _about_chains(scores: StructureScores) -> str:
    """Return DockQ and the mapping of chains in words; empty for a single chain."""
    dockq = "" if scores.dockq is None else f", DockQ {scores.dockq:.3f}"
    chains = [f"{ours}:{theirs}" for ours, theirs in scores.chain_mapping.items()]
    return f"{dockq}, chains {' '.join(chains)}" if len(chains) > 1 else dockq
