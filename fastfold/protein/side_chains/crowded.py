"""Side chains placed again, at angles between rotamers, where they overlap or a covalent bond passes through a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fastfold.protein.side_chains.assignment import choose
from fastfold.protein.side_chains.candidates import RotamerCandidates
from fastfold.protein.side_chains.overlaps import pair_energies
from fastfold.protein.side_chains.rings import Atom, PiercedRing, crosses, pierced_rings

_ROUNDS = 20  #: Choices that are made at most; each excludes the pierced rings of those before
_PIERCED = 100.0  #: Energy of a pierced ring, more than other candidates of two residues cost


def place_again(
    xyz: np.ndarray,
    present: np.ndarray,
    aatype: np.ndarray,
    tied: np.ndarray,
    is_movable: np.ndarray,
    is_crowded: np.ndarray,
    candidates_of: Callable[[list[int]], list[RotamerCandidates]],
) -> np.ndarray:
    """Return positions ``[N, 37, 3]`` in Å in which crowded residues and those of pierced rings are placed again.

    Candidates whose bonds pierce a ring in the choice cost more in the next. Of all choices that with the fewest
    pierced rings counts, and the first of equals. ``xyz`` is kept if it has fewer.

    Args:
        xyz: Positions ``[N, 37, 3]`` in Å.
        present: ``[N, 37]``, True for present atoms.
        aatype: ``[N]`` residue types.
        tied: ``[N]``, True for residues bonded to their predecessor.
        is_movable: ``[N]``, True for residues that may be placed again.
        is_crowded: ``[N]``, True for residues that overlap with others.
        candidates_of: Returns candidates of residues in a row, whose energies include those with all others.
    """
    pierced = pierced_rings(xyz, present, aatype, tied)
    of_rings = [i for ring in pierced for i in (ring.residue, *(residue for residue, _ in ring.bond))]
    is_placed_again = is_crowded.copy()
    is_placed_again[of_rings] = True
    residues = np.flatnonzero(is_placed_again & is_movable).tolist()
    if not residues:
        return xyz
    best, fewest = xyz, len(pierced) + 1
    candidates = candidates_of(residues)
    own, pairs = [one.energies for one in candidates], pair_energies(candidates, xyz)
    for _ in range(_ROUNDS):
        placed = xyz.copy()
        for one, k in zip(candidates, choose(own, pairs), strict=True):
            placed[one.residue, one.slots] = one.points[k, : len(one.slots)]
        pierced = pierced_rings(placed, present, aatype, tied)
        if len(pierced) < fewest:
            best, fewest = placed, len(pierced)
        if not pierced:
            break
        for ring in pierced:
            _exclude(ring, candidates, placed, own, pairs)
    return best


def _exclude(
    ring: PiercedRing,
    candidates: Sequence[RotamerCandidates],
    placed: np.ndarray,
    own: list[np.ndarray],
    pairs: dict[tuple[int, int], np.ndarray],
) -> None:
    """Add the energy of a pierced ring to all candidates with it."""
    corners = [(ring.residue, slot) for slot in ring.atoms]
    i, j = _mover(corners, candidates), _mover(ring.bond, candidates)
    if i == j:  # nothing moves them, or as one
        return
    rings = np.stack([_points(atom, i, candidates, placed) for atom in corners], 1)
    starts, ends = (_points(atom, j, candidates, placed) for atom in ring.bond)
    energies = _PIERCED * np.array([crosses(one, starts, ends) for one in rings])
    if i is None:
        assert j is not None
        own[j] = own[j] + energies[0]
    elif j is None:
        own[i] = own[i] + energies[:, 0]
    else:
        key = min(i, j), max(i, j)
        pairs[key] = pairs.get(key, 0.0) + (energies if i < j else energies.T)


def _mover(atoms: Sequence[Atom], candidates: Sequence[RotamerCandidates]) -> int | None:
    """Return the place of the first candidates that move one of the atoms."""
    for place, one in enumerate(candidates):
        if any(residue == one.residue and slot in one.slots for residue, slot in atoms):
            return place
    return None


def _points(
    atom: Atom, place: int | None, candidates: Sequence[RotamerCandidates], placed: np.ndarray
) -> np.ndarray:
    """Return an atom's positions ``[K, 3]`` in the candidates at a place, or its only one ``[1, 3]``."""
    residue, slot = atom
    if place is None:
        return np.asarray(placed[None, residue, slot])
    one = candidates[place]
    if residue == one.residue and slot in one.slots:
        return np.asarray(one.points[:, one.slots.index(slot)])
    return np.broadcast_to(placed[residue, slot], (len(one.points), 3))
