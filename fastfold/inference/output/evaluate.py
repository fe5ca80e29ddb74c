"""Compare predictions with experimental structures: ``fastfold infer --reference``."""

from __future__ import annotations

import glob
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fastfold.data.targets import safe_stem
from fastfold.errors import InputError
from fastfold.inference.config import OutputFormat
from fastfold.inference.output.score_files import lines_json, rounded
from fastfold.protein.io.read import read_structure, read_user_structure
from fastfold.protein.metrics.compare import StructureScores, compare_structures
from fastfold.protein.structure import structure_to_protein
from fastfold.utils.atomic_files import write_atomic

SCHEMA_VERSION = 1
_ENDINGS = (".cif", ".mmcif", ".pdb", ".ent")


def find_reference(reference: Path, name: str) -> Path | None:
    """Return a target's experimental structure: a file, or ``<target>.pdb`` (``.cif``, ``.gz``) of a folder.

    None if a folder has none of that name. An InputError tells that ``reference`` does not exist.
    """
    if reference.is_file():
        return reference
    if not reference.is_dir():
        raise InputError("no such file or folder; check the name given with --reference", path=reference)
    paths = (reference / f"{name}{ending}{packed}" for ending in _ENDINGS for packed in ("", ".gz"))
    return next(filter(Path.is_file, paths), None)


def compare_target(
    output: Path, name: str, reference: Path, output_format: OutputFormat = "fastfold"
) -> tuple[dict[str, StructureScores], str]:
    """Compare the written predictions of a target with a structure, and write ``<target>_reference.json``.

    It has, per prediction, TM-score, GDT and others, and lDDT-CA per residue of the reference; or ``not_comparable``,
    the reason, if the reference and the target do not share a residue.

    Returns:
        Scores by prediction, the best ranked first, and the reason why there are none, else an empty text.

    Raises:
        InputError: The reference cannot be read.
        OutputError: The scores cannot be written.
    """
    true = structure_to_protein(read_user_structure(reference))
    stem = safe_stem(name)
    kinds = ("",) if output_format == "fastfold" else ("_unrelaxed", "_relaxed")
    proteins = {
        path.stem: structure_to_protein(read_structure(path))
        for kind in kinds
        for path in sorted(output.glob(f"{glob.escape(stem)}{kind}_rank_*.cif"))
    }
    scores: dict[str, object] = {"schema_version": SCHEMA_VERSION, "name": name, "reference": reference.name}
    found, reason = {}, ""
    try:
        found = {key: compare_structures(protein, true) for key, protein in proteins.items()}
    except InputError as error:
        reason = scores["not_comparable"] = str(error)
    for key, value in found.items():
        plain = asdict(value)
        per_residue = plain.pop("lddt_ca_per_residue")
        plain = {k: v if isinstance(v, int) else round(float(v), 4) for k, v in plain.items()}
        plain["lddt_ca_per_residue"] = [None if np.isnan(x) else rounded(x, 4) for x in per_residue]
        scores[key] = plain
    write_atomic(output / f"{stem}_reference.json", lines_json(scores))
    return found, reason
