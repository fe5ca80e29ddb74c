"""Atoms from chi angles are those of the network's torsion angles, and their angles are found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import atom14_to_atom37, frames_to_atom14, torsion_angles_to_frames
from fastfold.protein.rigid import Rigid
from fastfold.protein.side_chains.build import (
    OXYGEN,
    axis_slots,
    group_slots,
    place_group,
    side_chain_groups,
    torsion_of_atom,
)

GENERATOR = np.random.default_rng(0)


def whole_residue(aatype: int, degrees: np.ndarray) -> np.ndarray:
    """Return atom37 positions by Algorithm 24, which other tests compare with the official program's."""
    radians = torch.deg2rad(torch.from_numpy(degrees))
    sin_cos = torch.stack([radians.sin(), radians.cos()], -1)[None]
    q = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    rotation = torch.from_numpy(q * np.sign(np.linalg.det(q)))[None]
    backbone = Rigid(rotation, torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64))
    aatypes = torch.tensor([aatype])
    atom14 = frames_to_atom14(aatypes, torsion_angles_to_frames(aatypes, backbone, sin_cos))
    return atom14_to_atom37(atom14, aatypes)[0].numpy()


@pytest.mark.parametrize("aatype", range(20), ids=list(rc.restypes))
def test_groups_are_algorithm_24_s(aatype: int) -> None:
    degrees = GENERATOR.uniform(-180, 180, 7)
    atoms = whole_residue(aatype, degrees)
    for group in (0, OXYGEN, *side_chain_groups(aatype)):
        slots = [slot for slot in group_slots(aatype, group) if rc.atom_types[slot] not in ("N", "CA", "C")]
        if not slots:
            continue
        axis = atoms[axis_slots(aatype, group)]
        angle = degrees[max(group - 1, 0)]
        found = place_group(aatype, group, slots, axis[None], np.array([angle]))[0]
        np.testing.assert_allclose(found, atoms[slots], atol=2e-3)
        if group > OXYGEN:
            for slot in slots:
                (found_angle,) = torsion_of_atom(aatype, group, slot, axis[None], atoms[[slot]])
                off = found_angle - angle
                assert abs((off + 180) % 360 - 180) < 0.2
