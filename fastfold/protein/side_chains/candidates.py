"""Candidate positions of residues' missing side-chain atoms: one for each of their rotamers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

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
class RotamerCandidates:
    """``K`` candidates for the missing atoms of a residue."""

    residue: int
    slots: list[int]  #: Atom37 slots of the ``M`` missing atoms
    points: np.ndarray  #: ``[K, P, 3]`` float64 in Å: the atoms, and then centres of rings
    kinds: np.ndarray  #: ``[P]``, of :func:`~fastfold.protein.side_chains.clashes.contact_points`
    energies: np.ndarray  #: ``[K]``, 0 for the most probable rotamer

    def select(self, rows: np.ndarray, energies: np.ndarray) -> RotamerCandidates:
        """Return some candidates, with new energies of all ``[K]``."""
        return RotamerCandidates(self.residue, self.slots, self.points[rows], self.kinds, energies[rows])


def side_chain_candidates(
    residues: Sequence[int],
    xyz: np.ndarray,
    known: np.ndarray,
    aatype: np.ndarray,
    torsions: np.ndarray,
    hints: np.ndarray | None = None,
    *,
    deviations: Sequence[float] = (0.0,),
) -> list[RotamerCandidates]:
    """Return the positions of residues' missing side-chain atoms in each of their rotamers.

    Known atoms determine their chi angles, so that rotamers differ in the others.

    Args:
        residues: Their indices.
        xyz: Positions ``[N, 37, 3]`` in Å.
        known: ``[N, 37]``, True for atoms that stay; N, CA, C and CB of the residues are among them.
        aatype: ``[N]`` residue types.
        torsions: ``[N, 2]`` phi and psi in degrees, or NaN.
        hints: Further chi angles ``[N, 4]`` to try, in degrees. NaN where unknown; they count if all are known.
        deviations: Degrees from a rotamer's first two angles; a candidate for each pair, instead of the rotamer alone.
    """
    alike = defaultdict[tuple[int, bytes, bool], list[int]](list)  # residues that are built together
    for i in residues:
        has_hint = hints is not None and bool(np.isfinite(hints[i, : len(_layout(int(aatype[i])))]).all())
        alike[int(aatype[i]), known[i].tobytes(), has_hint].append(i)
    by_residue: dict[int, RotamerCandidates] = {}
    for (kind, _, has_hint), group in alike.items():
        atoms = {slot: xyz[group, slot] for slot in np.flatnonzero(known[group[0]]).tolist()}
        own_hints = hints[group] if hints is not None and has_hint else None
        for one in _of_alike(group, kind, atoms, torsions[group], own_hints, deviations):
            by_residue[one.residue] = one
    return [by_residue[i] for i in residues]


def _of_alike(
    residues: Sequence[int],
    aatype: int,
    atoms: dict[int, np.ndarray],
    torsions: np.ndarray,
    hints: np.ndarray | None,
    deviations: Sequence[float],
) -> list[RotamerCandidates]:
    """Return the candidates of ``R`` residues of one type with the same known ``atoms [R, 3]``."""
    chi, energies = rotamers(aatype, torsions[:, 0], torsions[:, 1])
    energies = energies - energies.min(-1, keepdims=True)
    chi = np.broadcast_to(chi, (len(residues), *chi.shape))
    if hints is not None:
        chi = np.concatenate([chi, hints[:, None]], 1)
        energies = np.pad(energies, ((0, 0), (0, 1)), constant_values=-_HINT_GAIN)
    groups = _layout(aatype)
    chi, energies = _with_deviations(chi, energies, len(groups), deviations)
    count = energies.shape[1]
    flat = {slot: np.repeat(atom, count, 0) for slot, atom in atoms.items()}  # [R * K, 3]
    points = dict(flat)
    slots: list[int] = []
    for number, (group, axis, members) in enumerate(groups):
        angles = chi[..., number]
        known, missing = (
            [slot for slot in members if (slot in atoms) == is_known] for is_known in (True, False)
        )
        if known and set(axis) <= atoms.keys():
            corners = np.stack([atoms[slot] for slot in axis], 1)
            measured = torsion_of_atom(aatype, group, known[0], corners, atoms[known[0]])[:, None]
            energies = energies + _of_known(angles, measured, rc.chi_pi_periodic[aatype, number] > 0.5)
            angles = np.broadcast_to(measured, angles.shape)
        if missing:
            axes = np.stack([points[slot] for slot in axis], 1)
            placed = place_group(aatype, group, missing, axes, angles.reshape(-1))
            points |= {slot: placed[:, place] for place, slot in enumerate(missing)}
            slots += missing
    if rc.restypes[aatype] == "P" and _CD in slots:
        length = np.linalg.norm(points[_CD] - flat[_N], axis=-1).reshape(energies.shape)
        energies = energies + _CLOSURE_STIFFNESS * (length - _CLOSURE) ** 2
    contacts, kinds = contact_points(aatype, slots, np.stack([points[slot] for slot in slots], 1), flat)
    contacts = contacts.reshape(len(residues), count, *contacts.shape[1:])
    return [
        RotamerCandidates(i, slots, own_points, kinds, own_energies)
        for i, own_points, own_energies in zip(residues, contacts, energies, strict=True)
    ]


@cache
def _layout(aatype: int) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
    """Return the rigid group of each chi angle, with the slots of its axis and of its atoms."""
    return tuple(
        (group, tuple(axis_slots(aatype, group)), tuple(group_slots(aatype, group)))
        for group in side_chain_groups(aatype)
    )


def _with_deviations(
    chi: np.ndarray, energies: np.ndarray, angles: int, deviations: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return chi angles ``[R, K, 4]`` and energies ``[R, K]`` with all deviations of the first two of ``angles``."""
    for number in range(min(angles, 2)):
        turns = np.tile(deviations, chi.shape[1])
        chi, energies = np.repeat(chi, len(deviations), 1), np.repeat(energies, len(deviations), 1)
        chi[..., number] += turns
        energies = energies + 0.5 * (turns / _ROTAMER_WIDTH) ** 2
    return chi, energies


def _of_known(angles: np.ndarray, measured: np.ndarray, is_periodic: bool) -> np.ndarray:
    off = np.abs(angle_difference(angles, measured))
    if is_periodic:
        off = np.minimum(off, 180.0 - off)
    return np.minimum((off / _KNOWN_WIDTH) ** 2, _MAX_KNOWN)
