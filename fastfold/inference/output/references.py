"""Comparison of written predictions with a structure, which a file of scores and a line for users tell."""

from __future__ import annotations

import glob
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fastfold.data.targets import Target, safe_stem
from fastfold.errors import InputError
from fastfold.inference.config import OutputFormat
from fastfold.inference.output.file_names import fastfold_name, ranked_target
from fastfold.inference.output.results_folder import TargetResults
from fastfold.inference.output.score_files import (
    BACKBONE,
    ReferenceKind,
    lines_json,
    rounded,
    rounded_tree,
)
from fastfold.inference.progress import Progress
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import COMPARISON, ObservedStructure, read_logged
from fastfold.protein.io.read import named_protein, read_structure
from fastfold.protein.metrics.compare import StructureScores, compare_structures
from fastfold.utils.atomic_files import write_atomic

SCHEMA_VERSION = 1
_EXPERIMENT = re.compile("x-ray|electron|nmr|neutron|diffraction|scattering|microscopy|epr|fluorescence")
_MODEL = re.compile("theoretical|predicted|computational")
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
        # Another target may be named like a prediction: p_rank_1.
        if (ranked_target(fastfold_name(path.name)) or ("",))[0] == stem
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
    if _EXPERIMENT.search(method):
        return "experiment"
    return "model" if _MODEL.search(method) else "structure"


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


def _about_chains(scores: StructureScores) -> str:
    """Return DockQ and the mapping of chains in words; empty for a single chain."""
    dockq = "" if scores.dockq is None else f", DockQ {scores.dockq:.3f}"
    chains = [f"{ours}:{theirs}" for ours, theirs in scores.chain_mapping.items()]
    return f"{dockq}, chains {' '.join(chains)}" if len(chains) > 1 else dockq
