"""Backbone-dependent rotamers of the amino acids, from a table fitted to experimental structures."""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np

from fastfold.protein import residue_constants as rc

TABLE_FILE = "side_chains.npz"
GRID_STEP = 30.0  #: Degrees between the points of the table's grid of phi and psi
ENERGY_UNIT = 0.05  #: Unit of the table's energies, which are bytes


@cache
def load_table() -> dict[str, np.ndarray]:
    """Return the arrays of the package's table of rotamers and contact energies, by name."""
    with resources.files("fastfold.protein.side_chains").joinpath(TABLE_FILE).open("rb") as file:
        return dict(np.load(file))


def rotamers(aatype: int, phi: float, psi: float) -> tuple[np.ndarray, np.ndarray]:
    """Return chi angles ``[R, 4]`` in degrees and energies ``[R]`` of a residue's rotamers.

    The energy is the negative logarithm of the probability at ``phi`` and ``psi`` in degrees, or at any backbone if one
    is NaN. Missing chi angles are zero. A residue type without chi angles has no rotamers.

    Example:
        >>> from fastfold.protein.residue_constants import restype_order
        >>> from fastfold.protein.side_chains import rotamers
        >>> chi, energies = rotamers(restype_order["V"], -63.0, -43.0)  # in a helix
        >>> round(float(chi[energies.argmin(), 0]))
        176
    """
    name = f"{rc.restypes_with_x[aatype]}_chi"
    if name not in load_table():
        return np.zeros((0, 4)), np.zeros(0)
    chi = load_table()[name].astype(np.float64)
    energies = load_table()[f"{rc.restypes_with_x[aatype]}_energy"] * ENERGY_UNIT
    angles = np.pad(chi, ((0, 0), (0, 4 - chi.shape[1])))
    if not np.isfinite([phi, psi]).all():
        return angles, energies[:, 0]
    points = round(360.0 / GRID_STEP)
    grid = energies[:, 1:].reshape(-1, points, points)
    (row, column), (along_phi, along_psi) = np.divmod((np.array([phi, psi]) + 180.0) / GRID_STEP, 1.0)
    rows, columns = (
        np.array([row, row + 1]).astype(int) % points,
        np.array([column, column + 1]).astype(int) % points,
    )
    corners = np.exp(-grid[:, rows[:, None], columns[None]])
    weights = np.outer([1.0 - along_phi, along_phi], [1.0 - along_psi, along_psi])
    return angles, -np.log((corners * weights).sum((1, 2)))
