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


def rotamers(aatype: int, phi: float | np.ndarray, psi: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return chi angles ``[R, 4]`` in degrees and energies ``[*, R]`` of the rotamers of residues of one type.

    The energy is the negative logarithm of the probability at ``phi [*]`` and ``psi [*]`` in degrees, or at any
    backbone if one is NaN. Missing chi angles are zero. A residue type without chi angles has no rotamers.

    Example:
        >>> from fastfold.protein.residue_constants import restype_order
        >>> from fastfold.protein.side_chains import rotamers
        >>> chi, energies = rotamers(restype_order["V"], -63.0, -43.0)  # in a helix
        >>> round(float(chi[energies.argmin(), 0]))
        176
    """
    torsions = np.stack(np.broadcast_arrays(phi, psi), -1)
    name = f"{rc.restypes_with_x[aatype]}_chi"
    if name not in load_table():
        return np.zeros((0, 4)), np.zeros((*torsions.shape[:-1], 0))
    chi = load_table()[name].astype(np.float64)
    energies = load_table()[f"{rc.restypes_with_x[aatype]}_energy"] * ENERGY_UNIT
    angles = np.pad(chi, ((0, 0), (0, 4 - chi.shape[1])))
    points = round(360.0 / GRID_STEP)
    grid = energies[:, 1:].reshape(-1, points, points)
    is_known = np.isfinite(torsions).all(-1)
    cell, along = np.divmod((np.where(is_known[..., None], torsions, 0.0) + 180.0) / GRID_STEP, 1.0)
    corner = (cell[..., None] + np.arange(2)).astype(int) % points  # [*, phi and psi, 2]
    weights = np.stack([1.0 - along, along], -1)
    corners = np.exp(-grid[:, corner[..., 0, :, None], corner[..., 1, None, :]])
    probability = (corners * (weights[..., 0, :, None] * weights[..., 1, None, :])).sum((-1, -2))
    return angles, np.where(is_known[..., None], -np.log(np.moveaxis(probability, 0, -1)), energies[:, 0])
