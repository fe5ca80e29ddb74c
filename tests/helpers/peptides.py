"""Peptides in good shape, built from torsion angles: what a force field can take, without any file."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import atom14_to_atom37, frames_to_atom14, torsion_angles_to_frames
from fastfold.protein.protein import Protein
from fastfold.protein.rigid import Rigid

_PHI, _PSI, _OMEGA = -60.0, -45.0, 180.0


def helix(*sequences: str, apart: float = 30.0) -> Protein:
    """Alpha helices side by side, one for each sequence, numbered from 1; B-factors are 50, 51, ... by residue.

    Args:
        *sequences: One-letter sequences; ``X`` has no atoms.
        apart: Distance between the chains, in Å.
    """
    parts = [_helix(sequence) + np.float32([apart * i, 0, 0]) for i, sequence in enumerate(sequences)]
    aatype = rc.sequence_to_aatype("".join(sequences))
    mask = np.array(rc.restype_atom37_mask)[aatype] * (aatype != rc.unk_restype_index)[:, None]
    return Protein(
        atom_positions=np.concatenate(parts) * mask[..., None],
        atom_mask=mask,
        aatype=aatype,
        residue_index=np.concatenate([np.arange(1, len(s) + 1) for s in sequences]),
        chain_index=np.repeat(np.arange(len(sequences)), [len(s) for s in sequences]),
        b_factors=(50.0 + np.arange(len(aatype)))[:, None] * mask,
    )


def twisted(protein: Protein, residue: int, degrees: float) -> Protein:
    """Turn a residue and all after it about the peptide bond before it."""
    xyz = protein.atom_positions.astype(np.float64)
    origin, axis = xyz[residue - 1, rc.atom_order["C"]], xyz[residue, rc.atom_order["N"]]
    axis = (axis - origin) / np.linalg.norm(axis - origin)
    arms, angle = xyz[residue:] - origin, math.radians(degrees)
    along = (arms @ axis)[..., None] * axis
    turned = along + math.cos(angle) * (arms - along) + math.sin(angle) * np.cross(axis, arms)
    xyz[residue:] = origin + turned
    return replace(protein, atom_positions=xyz)


def _helix(sequence: str) -> np.ndarray:
    """Heavy atoms ``[N, 37, 3]`` of one chain."""
    aatype = torch.from_numpy(rc.sequence_to_aatype(sequence)).long()
    n, ca, c = torch.tensor(_backbone(len(sequence)), dtype=torch.float32).unbind(1)
    frames = Rigid.from_three_points(2 * ca - c, ca, n)
    radians = torch.deg2rad(torch.tensor([_OMEGA, _PHI, _PSI, -60.0, 180.0, 180.0, 180.0]))
    sin_cos = torch.stack([radians.sin(), radians.cos()], -1).expand(len(sequence), 7, 2)
    atom14 = frames_to_atom14(aatype, torsion_angles_to_frames(aatype, frames, sin_cos))
    return atom14_to_atom37(atom14, aatype).numpy()


def _backbone(length: int) -> np.ndarray:
    """N, CA and C ``[N, 3, 3]``, each atom from the three before it."""
    atoms = [np.array([0.0, 0.0, 0.0]), np.array([1.458, 0.0, 0.0]), np.array([2.0, 1.42, 0.0])]
    steps = [(1.329, 116.2, _PSI), (1.458, 121.7, _OMEGA), (1.525, 111.0, _PHI)]  # bond, angle, torsion
    while len(atoms) < 3 * length:
        bond, angle, torsion = steps[len(atoms) % 3]
        angle, torsion = math.radians(angle), math.radians(torsion)
        x = atoms[-1] - atoms[-2]
        x /= np.linalg.norm(x)
        z = np.cross(atoms[-2] - atoms[-3], x)
        z /= np.linalg.norm(z)
        along = -math.cos(angle) * x
        across = math.sin(angle) * (math.cos(torsion) * np.cross(z, x) + math.sin(torsion) * z)
        atoms.append(atoms[-1] + bond * (along + across))
    return np.array(atoms).reshape(-1, 3, 3)
