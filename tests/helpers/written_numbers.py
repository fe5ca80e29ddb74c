"""Numbers of written files, read and computed again without the package: tables, CA atoms, superpositions."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from Bio.PDB import MMCIFParser


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a table with tabs, by the names of its columns."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def read_values(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def ca_of(path: Path) -> np.ndarray:
    """CA atoms ``[N, 3]`` of an mmCIF file in Å."""
    structure = MMCIFParser(QUIET=True).get_structure("", str(path))
    return np.array([residue["CA"].coord for residue in structure.get_residues()], np.float64)


def superposed(moving: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """``moving [N, 3]`` on ``fixed [N, 3]``, without a reflection."""
    rotation, translation = motion_of(moving, fixed)
    return moving @ rotation + translation


def motion_of(moving: np.ndarray, fixed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rotation from the right and translation of the best superposition, by Kabsch's formula."""
    left, _, right = np.linalg.svd((moving - moving.mean(0)).T @ (fixed - fixed.mean(0)))
    rotation = left @ np.diag([1.0, 1.0, np.sign(np.linalg.det(left @ right))]) @ right
    return rotation, fixed.mean(0) - moving.mean(0) @ rotation


def check_cells(row: Mapping[str, str], expected: Mapping[str, float | str | None], *, places: int) -> None:
    """Assert that cells of a row are numbers to some decimals, texts, or empty for None."""
    for name, value in expected.items():
        if value is None or isinstance(value, str):
            assert row[name] == (value or ""), name
        else:
            assert abs(float(row[name]) - value) <= 0.51 * 10.0**-places, (name, row[name], value)
