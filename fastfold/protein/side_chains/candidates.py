"""Candidate positions of one residue's missing side-chain atoms: one for each of its rotamers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import angle_difference
from fastfold.protein.side_chains.build import (
    axis_slots,
    group_slots,
    place_group,
    side_chain_groups,
    torsion_of_atom,
)
from fastfold.protein.side_chains.clashes import contact_points
from fastfold.protein.side_chains.rotamers import rotamers

_N, _CD = (rc.atom_order[name] for name in ("N", "CD"))
_KNOWN_WIDTH, _MAX_KNOWN = 20.0, 9.0
"""Tolerance in degrees of a rotamer's angle against that of known atoms, and the largest energy of the difference."""
_ROTAMER_WIDTH = 12.0  #: Usual deviation in degrees of an angle from its rotamer's
_HINT_GAIN = 1.0  #: Energy by which a hint is better than the most probable rotamer
_CLOSURE, _CLOSURE_STIFFNESS = 1.47, 100.0
"""Length in Å of the bond that closes proline's ring, and the stiffness of its energy in 1/Å²."""


@dataclass(frozen=True)
class Candidates:
    """``K`` candidates for the missing atoms of a residue."""

    residue: int
    slots: list[int]  #: Atom37 slots of the ``M`` missing atoms
    points: np.ndarray  #: ``[K, P, 3]`` float64 in Å: the atoms, and then centres of rings
    kinds: np.ndarray  #: ``[P]``, of :func:`~fastfold.protein.side_chains.clashes.contact_points`
    energies: np.ndarray  #: ``[K]``, 0 for the most probable rotamer

    def select(self, rows: np.ndarray, energies: np.ndarray) -> Candidates:
        """Return some candidates, with new energies of all ``[K]``."""
        return Candidates(self.residue, self.slots, self.points[rows], self.kinds, energies[rows])


def side_chain_candidates(
    residue: int,
    aatype: int,
    atoms: dict[int, np.ndarray],
    torsions: np.ndarray,
    hint: np.ndarray | None = None,
    *,
    deviations: Sequence[float] = (0.0,),
) -> Candidates:
    """Return the positions of a residue's missing side-chain atoms in each of its rotamers.

    Known atoms determine their chi angles, so that rotamers differ in the others.

    Args:
        residue: Its index.
        aatype: Its type.
        atoms: Positions ``[3]`` in Å of known atoms by atom37 slot, with N, CA, C and CB.
        torsions: Phi and psi in degrees, or NaN.
        hint: Further chi angles ``[4]`` to try, in degrees. NaN where unknown; they count if all are known.
        deviations: Degrees from a rotamer's first two angles; a candidate for each pair, instead of the rotamer alone.
    """
    chi, energies = rotamers(aatype, *torsions)
    energies = energies - energies.min()
    groups = side_chain_groups(aatype)
    if hint is not None and np.isfinite(hint[: len(groups)]).all():
        chi, energies = np.concatenate([chi, hint[None]]), np.append(energies, -_HINT_GAIN)
    chi, energies = _with_deviations(chi, energies, len(groups), deviations)
    points = {slot: np.broadcast_to(atom, (len(chi), 3)) for slot, atom in atoms.items()}
    slots: list[int] = []
    for number, group in enumerate(groups):
        angles, axis = chi[:, number], axis_slots(aatype, group)
        members = group_slots(aatype, group)
        known, missing = (
            [slot for slot in members if (slot in atoms) == is_known] for is_known in (True, False)
        )
        if known and set(axis) <= atoms.keys():
            corners = np.stack([atoms[slot] for slot in axis])
            measured = torsion_of_atom(aatype, group, known[0], corners, atoms[known[0]])
            energies = energies + _of_known(angles, measured, rc.chi_pi_periodic[aatype, number] > 0.5)
            angles = np.full(len(chi), measured)
        if missing:
            placed = place_group(aatype, group, missing, np.stack([points[slot] for slot in axis], 1), angles)
            points |= {slot: placed[:, place] for place, slot in enumerate(missing)}
            slots += missing
    if rc.restypes[aatype] == "P" and _CD in slots:
        length = np.linalg.norm(points[_CD] - atoms[_N], axis=-1)
        energies = energies + _CLOSURE_STIFFNESS * (length - _CLOSURE) ** 2
    contacts, kinds = contact_points(aatype, slots, np.stack([points[slot] for slot in slots], 1), atoms)
    return Candidates(residue, slots, contacts, kinds, energies)


def _with_deviations(
    chi: np.ndarray, energies: np.ndarray, angles: int, deviations: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return chi angles ``[K, 4]`` and energies ``[K]`` with all deviations of the first two of ``angles``."""
    for number in range(min(angles, 2)):
        turns = np.tile(deviations, len(chi))
        chi, energies = np.repeat(chi, len(deviations), 0), np.repeat(energies, len(deviations))
        chi[:, number] += turns
        energies = energies + 0.5 * (turns / _ROTAMER_WIDTH) ** 2
    return chi, energies


def _of_known(angles: np.ndarray, measured: float, is_periodic: bool) -> np.ndarray:
    off = np.abs(angle_difference(angles, measured))
    if is_periodic:
        off = np.minimum(off, 180.0 - off)
    return np.minimum((off / _KNOWN_WIDTH) ** 2, _MAX_KNOWN)
