"""Residues of a complex that clash: by distances of CA atoms, or by overlaps of van der Waals spheres."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastfold.data.templates.entry import EntryChain
from fastfold.protein import residue_constants as rc

CLASH_DISTANCE = 3.5  #: Largest distance in Å of CA atoms of two residues that clash, as in AF_unmasked
HYDROGEN_BOND = 0.4
"""Overlap in Å that two atoms of a hydrogen bond may have in addition, as in AlphaPulldown."""

_ELEMENTS = [name[0] for name in rc.atom_types]
_RADII = np.array([rc.element_radius[element] for element in _ELEMENTS])
_BONDS = np.array([element in "NOS" for element in _ELEMENTS])


def clashing_residues(chains: Sequence[EntryChain]) -> list[np.ndarray]:
    """Return the residues of each chain, ``[N]`` bool, whose CA atom is within 3.5 Å of another residue's."""
    ca = rc.atom_order["CA"]
    points = np.concatenate([chain.positions[:, ca] for chain in chains]).astype(np.float64)
    known = np.concatenate([chain.mask[:, ca] for chain in chains]) > 0
    clashes = np.zeros(len(points), bool)
    for i in np.flatnonzero(known):  # in rows, because large complexes have many pairs
        near = np.linalg.norm(points - points[i], axis=-1) <= CLASH_DISTANCE
        near[i] = False
        clashes[i] = (near & known).any()
    return _split(clashes, chains)


def overlapping_residues(chains: Sequence[EntryChain], overlap: float) -> list[np.ndarray]:
    """Return the residues of each chain, ``[N]`` bool, with an atom that overlaps another residue's.

    As in AlphaPulldown, neighbours in a chain do not count. Spheres overlap by at least ``overlap`` in Å. Two atoms of
    nitrogen, oxygen or sulphur may overlap by 0.4 Å more.
    """
    lengths = [len(chain.sequence) for chain in chains]
    residue, atom = np.nonzero(np.concatenate([chain.mask for chain in chains]) > 0)
    points = np.concatenate([chain.positions for chain in chains])[residue, atom].astype(np.float64)
    number = np.repeat(np.arange(len(chains)), lengths)[residue]
    clashes = np.zeros(sum(lengths), bool)
    for i in range(len(points)):
        limit = _RADII[atom] + _RADII[atom[i]] - overlap - HYDROGEN_BOND * (_BONDS[atom] & _BONDS[atom[i]])
        close = np.square(points - points[i]).sum(-1) <= np.square(np.maximum(limit, 0.0))
        others = (number != number[i]) | (np.abs(residue - residue[i]) > 1)
        clashes[residue[i]] |= (close & others & (limit >= 0)).any()
    return _split(clashes, chains)


def _split(values: np.ndarray, chains: Sequence[EntryChain]) -> list[np.ndarray]:
    return np.split(values, np.cumsum([len(chain.sequence) for chain in chains])[:-1])
