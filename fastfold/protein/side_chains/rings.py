"""Rings of side chains that a covalent bond passes through, which no minimisation can undo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from fastfold.protein import residue_constants as rc

_HEXAGON = ("CG", "CD1", "CE1", "CZ", "CE2", "CD2")
RINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "F": (_HEXAGON,),
    "Y": (_HEXAGON,),
    "H": (("CG", "ND1", "CE1", "NE2", "CD2"),),
    "W": (("CG", "CD1", "NE1", "CE2", "CD2"), ("CD2", "CE2", "CZ2", "CH2", "CZ3", "CE3")),
    "P": (("N", "CA", "CB", "CG", "CD"),),
}
"""Atoms of each residue type's rings, in order."""
_MAX_BOND = 2.5  #: Length in Å above which atoms are not bonded; the longest bond, of two sulphurs, has 2.05
_REACH = 5.0  #: Distance in Å from a ring's centre beyond which a bond's first atom cannot pierce the ring
_C, _N, _SG = (rc.atom_order[name] for name in ("C", "N", "SG"))

Atom = tuple[int, int]
"""Index of a residue, and its atom37 slot."""


@dataclass(frozen=True)
class PiercedRing:
    """Ring with a covalent bond through it.

    Example:
        >>> from fastfold.protein.side_chains import PiercedRing
        >>> ring = PiercedRing(7, (5, 14, 13, 20, 12), bond=((3, 1), (3, 3)))  # a histidine, by CA-CB
        >>> ring.bond[0]
        (3, 1)
    """

    residue: int  #: Index of the ring's residue
    atoms: tuple[int, ...]  #: Atom37 slots of the ring, in order
    bond: tuple[Atom, Atom]  #: Atoms of the bond


def ring_slots(aatype: int) -> list[list[int]]:
    """Return the atom37 slots of each ring of a residue type."""
    return [[rc.atom_order[name] for name in ring] for ring in RINGS.get(rc.restypes_with_x[aatype], ())]


def pierced_rings(
    positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray, tied: np.ndarray
) -> tuple[PiercedRing, ...]:
    """Return the rings that a covalent bond of heavy atoms passes through, with the bond.

    The ring's surface are the triangles between its centre and its bonds, and a bond pierces it where it intersects
    one. Bonds that share an atom with the ring cannot. Atoms more than 2.5 Å apart are not bonded.

    Args:
        positions: Atom37 positions ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for present atoms.
        aatype: ``[N]`` residue types.
        tied: ``[N]``, True for residues bonded to their predecessor.

    Example:
        >>> import fastfold
        >>> from fastfold.protein.geometry import follows
        >>> from fastfold.protein.side_chains import pierced_rings
        >>> protein = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).protein
        >>> tied = follows(protein.chain_index, protein.residue_index)
        >>> len(pierced_rings(protein.atom_positions, protein.atom_mask, protein.aatype, tied))
        0
    """
    xyz, present = np.asarray(positions, np.float64), np.asarray(mask) > 0.5
    first, second = _bonds(xyz, present, aatype, tied)
    starts, ends = xyz[tuple(first.T)], xyz[tuple(second.T)]
    pierced = []
    for residue in np.flatnonzero(present.any(-1)).tolist():
        for slots in ring_slots(int(aatype[residue])):
            if not present[residue, slots].all():
                continue
            ring = xyz[residue, slots]
            near = np.linalg.norm(starts - ring.mean(0), axis=-1) < _REACH
            for side in (first, second):
                near &= ~((side[:, 0] == residue) & np.isin(side[:, 1], slots))
            rows = np.flatnonzero(near)
            for row in rows[crosses(ring, starts[rows], ends[rows])].tolist():
                bond = tuple(first[row].tolist()), tuple(second[row].tolist())
                pierced.append(PiercedRing(residue, tuple(slots), bond))
    return tuple(pierced)


def crosses(ring: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return a mask ``[B]`` of segments ``[B, 3]`` that intersect a triangle of ``ring [R, 3]`` and its centre."""
    center = ring.mean(0)
    first, second = ring - center, np.roll(ring, -1, 0) - center
    direction = (ends - starts)[:, None]
    # The intersection is centre + u * first + v * second = start + t * direction.
    normal = np.cross(direction, second)
    determinant = (first * normal).sum(-1)
    scale = 1.0 / np.where(np.abs(determinant) < 1e-12, np.inf, determinant)
    from_center = (starts - center)[:, None]
    u = (from_center * normal).sum(-1) * scale
    across = np.cross(from_center, first)
    v = (direction * across).sum(-1) * scale
    t = (second * across).sum(-1) * scale
    inside = (u >= 0.0) & (v >= 0.0) & (u + v <= 1.0) & (t >= 0.0) & (t <= 1.0) & (scale != 0.0)
    return np.asarray(inside.any(-1))


@cache
def _residue_bonds() -> dict[int, list[tuple[int, int]]]:
    bonds = defaultdict(list)
    for residue, one, other, *_ in rc.stereochemistry()[0]:
        bonds[rc.resnames.index(residue)].append((rc.atom_order[one], rc.atom_order[other]))
    return dict(bonds)


def _bonds(
    xyz: np.ndarray, present: np.ndarray, aatype: np.ndarray, tied: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return both atoms ``[B, 2]`` of each bond as residue and slot: within residues, peptides and disulfides."""
    pairs = np.array(list(_possible_bonds(present, aatype, tied)), int).reshape(-1, 2, 2)
    length = np.linalg.norm(xyz[tuple(pairs[:, 0].T)] - xyz[tuple(pairs[:, 1].T)], axis=-1)
    pairs = pairs[length < _MAX_BOND]
    return pairs[:, 0], pairs[:, 1]


def _possible_bonds(present: np.ndarray, aatype: np.ndarray, tied: np.ndarray) -> Iterator[tuple[Atom, Atom]]:
    for i in range(len(aatype)):
        for one, other in _residue_bonds().get(int(aatype[i]), []):
            if present[i, one] and present[i, other]:
                yield (i, one), (i, other)
        if tied[i] and present[i - 1, _C] and present[i, _N]:
            yield (i - 1, _C), (i, _N)
    sulphurs = np.flatnonzero((aatype == rc.restype_order["C"]) & present[:, _SG]).tolist()
    for place, i in enumerate(sulphurs):
        for j in sulphurs[place + 1 :]:
            yield (i, _SG), (j, _SG)
