"""Atoms of one residue built from chi angles and AlphaFold's rigid groups (Algorithm 24)."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import axis_frames, dihedrals

_N, _CA, _C = (rc.atom_order[name] for name in ("N", "CA", "C"))
BACKBONE = [rc.atom_order[name] for name in ("N", "CA", "C", "O", "CB", "OXT")]
"""Atom37 slots of atoms that do not depend on chi angles."""
OXYGEN, _CHI1 = 3, 4  #: Rigid groups of O, which psi rotates, and of chi1; group 0 is the backbone's


def group_slots(aatype: int, group: int) -> list[int]:
    """Return the atom37 slots of a rigid group's atoms."""
    return [
        rc.atom_order[name]
        for j, name in enumerate(rc.restype_atom14_names[aatype])
        if name and rc.restype_atom14_to_rigid_group[aatype, j] == group
    ]


def side_chain_groups(aatype: int) -> list[int]:
    """Return the rigid groups of a residue's chi angles, chi1 first."""
    return [_CHI1 + k for k in np.flatnonzero(rc.chi_angles_mask[aatype]).tolist()]


def axis_slots(aatype: int, group: int) -> list[int]:
    """Return the three atom37 slots that span the frame of a rigid group; the last one is its origin."""
    if group == 0:
        return [_N, _C, _CA]
    if group == OXYGEN:
        return [_N, _CA, _C]
    return [int(slot) for slot in rc.chi_atom_indices[aatype, group - _CHI1, :3]]


def place_group(
    aatype: int, group: int, slots: list[int], axis: np.ndarray, degrees: np.ndarray
) -> np.ndarray:
    """Return positions ``[K, M, 3]`` in Å of a group's atoms at torsion angles ``[K]``.

    ``axis [K, 3, 3]`` has the atoms of :func:`axis_slots`. ``slots`` are the ``M`` atoms to place.
    """
    local = rc.restype_atom14_rigid_group_positions[aatype, rc.restype_atom37_to_atom14[aatype, slots]]
    local = local.astype(np.float64)
    if group == 0:
        a, b, c = axis[:, 0], axis[:, 1], axis[:, 2]
        rotation, origin = axis_frames(a, 2.0 * c - b, c)  # x points from CA to C
        return np.asarray(np.einsum("kij,mj->kmi", rotation, local) + origin[:, None])
    rotation, origin = axis_frames(axis[:, 0], axis[:, 1], axis[:, 2])
    turn = np.radians(degrees)[:, None] + (
        np.pi if group == OXYGEN else 0.0
    )  # psi is measured at the next nitrogen
    cosine, sine = np.cos(turn), np.sin(turn)
    y, z = local[:, 1] * cosine - local[:, 2] * sine, local[:, 1] * sine + local[:, 2] * cosine
    turned = np.stack([np.broadcast_to(local[:, 0], y.shape), y, z], -1)
    return np.asarray(np.einsum("kij,kmj->kmi", rotation, turned) + origin[:, None])


def torsion_of_atom(aatype: int, group: int, slot: int, axis: np.ndarray, atom: np.ndarray) -> np.ndarray:
    """Return the group's torsion angles ``[K]`` in degrees that put its atom ``slot`` nearest to ``atom [K, 3]``."""
    at_zero = place_group(aatype, group, [slot], axis, np.zeros(len(axis)))[:, 0]
    a, b, c = axis.swapaxes(0, 1)
    return dihedrals(a, b, c, atom) - dihedrals(a, b, c, at_zero)
