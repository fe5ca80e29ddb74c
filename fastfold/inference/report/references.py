"""Comparison of predictions with reference structures: made after the fold, and read for the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fastfold.inference.config import OutputFormat
from fastfold.inference.output.score_files import BACKBONE, ReferenceKind, is_number, mapping_of
from fastfold.inference.report.discover import (
    SCORES,
    FoundPrediction,
    find_predictions,
    is_regular,
    leaving_out,
    read_json,
)
from fastfold.inference.report.encode import pack_atoms
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.scores import SCORES as TABLE

_SHOWN = tuple(one.name for one in TABLE if one.covers == "reference")
_LONGEST = 200


def compare_results(directory: Path, reference: Path, say: Callable[[str], None]) -> None:
    """Compare each target of a results folder with its structure, for the page.

    ``<target>_reference.json`` gets the scores, next to the files of the target.

    Args:
        directory: The folder.
        reference: Structure of all targets, or a folder of structures named like the targets.
        say: Called with a line for each target.

    Raises:
        InputError: The folder has no predictions, or a structure cannot be read.
    """
    # It imports PyTorch, which a page does not need.
    from fastfold.inference.output.references import compare_in_folder

    targets: dict[tuple[Path, str], FoundPrediction] = {}
    for prediction in find_predictions(directory):
        targets.setdefault((prediction.files[SCORES].parent, prediction.target), prediction)
    for (folder, stem), prediction in targets.items():
        name = str(prediction.scores["name"])
        is_plain = prediction.files[SCORES].name == f"{prediction.stem}{SCORES}"
        style: OutputFormat = "fastfold" if is_plain else "colabfold"
        say(compare_in_folder(folder, stem, (name, stem), reference, label=name, output_format=style))


def reference_of(prediction: FoundPrediction, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the comparison of a prediction with its reference for the page; None if there is none.

    It has ``file``, ``kind``, ``chains``, scores, and, of a reference whose residues correspond, ``lddt`` of each
    residue of the prediction and ``structure``: the packed backbone of the reference at these residues.
    """
    folder = next(iter(prediction.files.values())).parent
    path = folder / f"{prediction.target}_reference.json"
    if not is_regular(path):
        return None
    with leaving_out(path.name, say):
        content = read_json(path)
        own = content.get(prediction.stem)
        if not isinstance(own, dict):
            return None
        numbers = {key: number for key in _SHOWN if is_number(number := own.get(key))}
        chains = " ".join(f"{ours}:{theirs}" for ours, theirs in mapping_of(own, "chain_mapping").items())
        kind = content.get("kind")
        shown = {
            "file": str(content.get("reference"))[:_LONGEST],
            "kind": kind if kind in get_args(ReferenceKind) else "structure",
            "chains": chains[:_LONGEST],
        }
        return shown | numbers | _residues(content, own, len(prediction.scores["plddt"]))
    return None


def _residues(content: dict[str, Any], own: dict[str, Any], length: int) -> dict[str, Any]:
    """Return ``lddt`` and ``structure`` of a reference; nothing of a file without them. Raise ValueError for others."""
    rows, backbone, lddt = own.get("reference_rows"), content.get("backbone"), own.get("lddt_ca_per_residue")
    if rows is None or backbone is None or lddt is None:
        return {}
    try:
        pairs = [(i, row) for i, row in enumerate(rows) if row is not None]
        if len(rows) != length or any(type(row) is not int or row < 0 for _, row in pairs):
            raise ValueError
        mask, positions = np.zeros((length, rc.atom_type_num), bool), np.zeros((length, rc.atom_type_num, 3))
        by_residue: list[float | None] = [None] * length
        for i, row in pairs:
            by_residue[i] = lddt[row] if is_number(lddt[row]) else None
            for name, place in zip(BACKBONE, backbone[row], strict=True):
                if place is not None:
                    mask[i, rc.atom_order[name]] = True
                    positions[i, rc.atom_order[name]] = place
        if not np.isfinite(positions).all() or not mask.any():
            raise ValueError
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        raise ValueError("its residues do not match the prediction") from error
    layout, packed = pack_atoms(mask, positions)
    return {"lddt": by_residue, "structure": layout | {"packed": packed}}
