"""Build missing heavy atoms from AlphaFold's rigid groups, with the fewest clashes (Algorithm 24)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch

from fastfold.inference.relax.stereo import dihedrals, follows
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import frames_to_atom14, torsion_angles_to_frames
from fastfold.protein.protein import Protein
from fastfold.protein.rigid import Rigid

_N, _CA, _C, _O, _CD = (rc.atom_order[name] for name in ("N", "CA", "C", "O", "CD"))
_PSI, _CHI1 = 3, 4  #: Rigid groups; group 0 is the backbone's
_STAGGERED = (-60.0, 180.0, 60.0)
_PLANAR = (-90.0, -30.0, 30.0, 90.0, 150.0, -150.0)
_PLANAR_LAST = "DEFHNQRWY"  #: Residues whose last chi angle rotates a planar group
_PROLINE = ((-25.0, 36.0), (27.0, -36.0))
_PROLINE_CLOSURE = 1.47  #: Length in Å of the bond that closes proline's ring
_FREE_PSI = (135.0, -45.0)
_CONTACT = 3.6  #: Distance in Å below which two atoms clash
_REACH = 20.0  #: Distance in Å between alpha carbons beyond which side chains cannot touch
_NEAR_BACKBONE = {rc.atom_order[name] for name in ("CB", "CG", "CG1", "CG2", "OG", "OG1", "SG", "O")}
"""Atoms that are always near their residue's backbone."""
_LEAST_BEND = 0.5
"""Product of two bonds and the sine of their angle in Å², below which N, CA and C are collinear."""
_PASSES = 2  #: Number of passes over the residues; in the second pass all other residues are complete


def add_missing_atoms(protein: Protein) -> Protein:
    """Build the missing heavy atoms except terminal oxygens of residues of known type that have N, CA and C.

    Known atoms and their angles stay. Other chi angles take the rotamer with the fewest clashes.
    """
    present = protein.atom_mask > 0.5
    expected = np.array(rc.restype_atom37_mask)[protein.aatype] > 0.5
    xyz, known = protein.atom_positions.astype(np.float64), present.copy()
    to_n, to_c = xyz[:, _N] - xyz[:, _CA], xyz[:, _C] - xyz[:, _CA]
    is_bent = np.linalg.norm(np.cross(to_n, to_c), axis=-1) > _LEAST_BEND
    has_frame = present[:, [_N, _CA, _C]].all(-1) & is_bent
    todo = np.flatnonzero((expected & ~present).any(-1) & has_frame).tolist()
    if not todo:
        return protein
    candidates = {i: _candidates(protein, i) for i in todo}
    for i in todo * _PASSES:
        known[i] = present[i]
        slots, placed = candidates[i]
        scores = _overlaps(protein, i, slots, placed, xyz, known)
        xyz[i, slots], known[i, slots] = placed[np.argmin(np.round(scores, 6))], True
    return replace(protein, atom_positions=xyz, atom_mask=known)


def _candidates(protein: Protein, i: int) -> tuple[list[int], np.ndarray]:
    """Return a residue's ``M`` missing atoms, and their positions in Å ``[K, M, 3]`` for each choice of angles."""
    aatype, present, xyz = int(protein.aatype[i]), protein.atom_mask[i] > 0.5, protein.atom_positions[i]
    ideal_of = {rc.atom_order[name]: j for j, name in enumerate(rc.restype_atom14_names[aatype]) if name}
    group_of = {slot: int(rc.restype_atom14_to_rigid_group[aatype, j]) for slot, j in ideal_of.items()}
    axes = {0: [_N, _C, _CA], _PSI: [_N, _CA, _C]}
    for k in np.flatnonzero(rc.chi_angles_mask[aatype]).tolist():
        axes[_CHI1 + k] = [int(slot) for slot in rc.chi_atom_indices[aatype, k, :3]]
    ideal = _ideal(aatype, _angles(protein, i, axes, ideal_of, group_of))
    points = {slot: xyz[slot].astype(np.float64) for slot in group_of if present[slot]}
    missing = [slot for slot in group_of if not present[slot]]
    for slot in sorted(missing, key=lambda slot: group_of[slot]):
        axis = axes[group_of[slot]]
        own = _frames(*(ideal[:, ideal_of[atom]] for atom in axis))
        frames = _frames(*(np.broadcast_to(points[atom], (len(ideal), 3)) for atom in axis))
        local = own.invert_apply(torch.from_numpy(ideal[:, ideal_of[slot]]))
        points[slot] = frames.apply(local).numpy()
    return missing, np.stack([points[slot] for slot in missing], 1)


def _angles(
    protein: Protein, i: int, axes: dict[int, list[int]], ideal_of: dict[int, int], group_of: dict[int, int]
) -> np.ndarray:
    """Return sets of torsion angles to try ``[K, 7]``, in degrees; known atoms determine theirs."""
    aatype, present = int(protein.aatype[i]), protein.atom_mask[i] > 0.5
    xyz = protein.atom_positions.astype(np.float64)
    at_zero = _ideal(aatype, np.zeros((1, 7)))[0]
    last = max(axes)
    choices: dict[int, tuple[float, ...]] = {_PSI: _FREE_PSI}
    after = i + 1
    if after < len(protein) and follows(protein)[after] and protein.atom_mask[after, _N] > 0.5:
        choices[_PSI] = (float(dihedrals(xyz[i, _N], xyz[i, _CA], xyz[i, _C], xyz[after, _N])),)
    for group in range(_CHI1, last + 1):
        planar = group == last and rc.restypes[aatype] in _PLANAR_LAST
        choices[group] = _PLANAR if planar else _STAGGERED
    is_free = dict.fromkeys(choices, True)
    for group in choices:
        members = [slot for slot in group_of if group_of[slot] == group]
        fixed = [slot for slot in members if present[slot]]
        if fixed and present[axes[group]].all():
            now = dihedrals(*xyz[i, [*axes[group], fixed[0]]])
            zero = dihedrals(*at_zero[[ideal_of[slot] for slot in (*axes[group], fixed[0])]])
            choices[group], is_free[group] = (float(now - zero),), False
        elif len(fixed) == len(members):
            choices[group], is_free[group] = choices[group][:1], False
    if rc.restypes[aatype] == "P" and is_free[_CHI1]:
        combinations: list[tuple[float, ...]] = [(psi, *chis) for psi in choices[_PSI] for chis in _PROLINE]
    else:
        combinations = list(itertools.product(*choices.values()))
    angles = np.zeros((len(combinations), 7))
    angles[:, _PSI - 1 : _PSI - 1 + len(choices)] = combinations
    return angles


def _ideal(aatype: int, degrees: np.ndarray) -> np.ndarray:
    """Return atom14 positions ``[K, 14, 3]`` for torsion angles ``[K, 7]``, with the backbone at the origin."""
    count = len(degrees)
    radians = torch.deg2rad(torch.from_numpy(degrees))
    aatypes = torch.full((count,), aatype)
    rotations = torch.eye(3, dtype=torch.float64).expand(count, 3, 3)
    backbone = Rigid(rotations, torch.zeros(count, 3, dtype=torch.float64))
    frames = torsion_angles_to_frames(aatypes, backbone, torch.stack([radians.sin(), radians.cos()], -1))
    return np.asarray(frames_to_atom14(aatypes, frames))


def _frames(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Rigid:
    """Return frames with origin ``c [K, 3]``, oriented by ``b`` and ``a``."""
    on_axis, origin, in_plane = (torch.from_numpy(np.array(points, np.float64)) for points in (b, c, a))
    return Rigid.from_three_points(on_axis, origin, in_plane)


def _overlaps(
    protein: Protein, i: int, slots: list[int], placed: np.ndarray, xyz: np.ndarray, known: np.ndarray
) -> np.ndarray:
    """Return sums of squared overlaps of placed atoms with others ``[K]``, in Å²."""
    near = known & (np.linalg.norm(xyz[:, _CA] - xyz[i, _CA], axis=-1) < _REACH)[:, None]
    near[i] = False
    scores = _squares(placed, xyz[near])
    is_proline = rc.restypes[protein.aatype[i]] == "P"
    far = [slot not in _NEAR_BACKBONE for slot in slots]
    scores += _squares(placed[:, far], xyz[i, [_C, _O] if is_proline else [_N, _C, _O]])
    if is_proline and _CD in slots:
        closure = np.linalg.norm(placed[:, slots.index(_CD)] - xyz[i, _N], axis=-1)
        scores += 100.0 * (closure - _PROLINE_CLOSURE) ** 2
    return scores


def _squares(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    distance = np.linalg.norm(points[:, :, None] - others[None, None], axis=-1)
    return np.asarray(np.square(np.maximum(_CONTACT - distance, 0.0)).sum((1, 2)))
