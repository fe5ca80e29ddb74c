"""Ramachandran plot: regions of phi and psi that proteins have, for six kinds of residues.

The regions are those of Lovell et al. 2003 (doi:10.1002/prot.10286). They are drawn at shares of the residues of good
experimental structures: 98% are in the favoured region, and 1 of 2,000 (general) to 1 of 500 (cis-proline) outside of
the allowed one. ``benchmarks/fit_ramachandran_plot.py`` made the table from chains of the Protein Data Bank.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np

from fastfold.protein import residue_constants as rc

KINDS = ("general", "isoleucine or valine", "before proline", "glycine", "trans-proline", "cis-proline")
"""Kinds of residues with a plot of their own, in the order of the table."""
FAVORED, ALLOWED, OUTLIER, UNDEFINED = 0, 1, 2, -1
"""Regions; residues at chain ends and breaks are undefined."""

SCALE = 40.0  #: Steps of the table per power of ten
_FAVORED_SHARE = 0.02
_ALLOWED_SHARE = np.array([0.0005, 0.001, 0.001, 0.001, 0.001, 0.002])
_CIS = 30.0


def residue_kinds(aatype: np.ndarray, before_proline: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """Return the index in :data:`KINDS` of each residue, ``[N]`` int64.

    Args:
        aatype: ``[N]`` residue types.
        before_proline: ``[N]``, True for residues whose next one is proline.
        omega: ``[N]`` torsion of the peptide bond before each residue in degrees; NaN counts as trans.
    """
    kinds = np.zeros(len(aatype), np.int64)
    kinds[np.isin(aatype, [rc.restype_order["I"], rc.restype_order["V"]])] = 1
    kinds[before_proline] = 2
    kinds[aatype == rc.restype_order["G"]] = 3
    kinds[aatype == rc.restype_order["P"]] = 4
    kinds[(aatype == rc.restype_order["P"]) & (np.abs(omega) < _CIS)] = 5
    return kinds


def ramachandran_regions(phi: np.ndarray, psi: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Return the region of each residue: favoured 0, allowed 1, outlier 2, undefined -1.

    Args:
        phi: ``[N]`` in degrees, NaN where undefined.
        psi: ``[N]`` in degrees, NaN where undefined.
        kinds: ``[N]`` of :func:`residue_kinds`.

    Returns:
        ``[N]`` int64.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.validation.ramachandran import ramachandran_regions
        >>> phi, psi = np.array([-63.0, -100.0, 60.0, np.nan]), np.array([-43.0, 60.0, -60.0, 0.0])
        >>> ramachandran_regions(phi, psi, np.zeros(4, int)).tolist()  # a helix, a turn, neither, an end
        [0, 1, 2, -1]
    """
    known = ~(np.isnan(phi) | np.isnan(psi))
    share = 10.0 ** -rarity(np.where(known, phi, 0.0), np.where(known, psi, 0.0), kinds)
    regions = np.where(share >= _FAVORED_SHARE, FAVORED, ALLOWED)
    regions[share < _ALLOWED_SHARE[kinds]] = OUTLIER
    regions[~known] = UNDEFINED
    return regions


def region_map(cells: int = 72) -> np.ndarray:
    """Return the regions of general residues at the centres of cells, ``[cells, cells]`` int64: phi, then psi."""
    centers = (np.arange(cells) + 0.5) * 360.0 / cells - 180.0
    phi, psi = (x.ravel() for x in np.meshgrid(centers, centers, indexing="ij"))
    return ramachandran_regions(phi, psi, np.zeros(len(phi), np.int64)).reshape(cells, cells)


def rarity(phi: np.ndarray, psi: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Return ``-log10`` of the share of residues in less populated places, ``[N]``, interpolated in the table."""
    return interpolate(_table(), phi, psi, kinds) / SCALE


def interpolate(grids: np.ndarray, phi: np.ndarray, psi: np.ndarray, kinds: np.ndarray | int) -> np.ndarray:
    """Interpolate periodic grids linearly in both angles.

    Args:
        grids: ``[K, n, n]`` values at the centres of cells from -180 to 180 degrees.
        phi: ``[*]`` in degrees.
        psi: ``[*]`` in degrees.
        kinds: ``[*]`` grid of each pair of angles.

    Returns:
        ``[*]``.
    """
    size = grids.shape[-1]
    x, y = ((angle + 180.0) * size / 360.0 - 0.5 for angle in (phi, psi))
    i, j = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    u, v = x - i, y - j
    lower = (1 - u) * grids[kinds, i % size, j % size] + u * grids[kinds, (i + 1) % size, j % size]
    upper = (1 - u) * grids[kinds, i % size, (j + 1) % size] + u * grids[
        kinds, (i + 1) % size, (j + 1) % size
    ]
    return np.asarray((1 - v) * lower + v * upper)


@cache
def _table() -> np.ndarray:
    """Return the table ``[6, 72, 72]`` in float64: kinds, phi, psi in steps of 5 degrees from -177.5."""
    with resources.files(__package__).joinpath("ramachandran.npz").open("rb") as file:
        return np.load(file, allow_pickle=False)["rarity"].astype(np.float64)
