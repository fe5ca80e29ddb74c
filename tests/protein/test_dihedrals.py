"""Angles of atoms agree with gemmi's, and backbone torsions end where the chain does."""

from __future__ import annotations

import gemmi
import numpy as np

from fastfold.protein.geometry import (
    angle_difference,
    angles,
    axis_frames,
    backbone_torsions,
    dihedrals,
    follows,
)
from tests.helpers.peptides import helix

POINTS = np.random.default_rng(0).normal(size=(50, 4, 3))


def test_dihedrals_and_angles_are_gemmi_s() -> None:
    for points in POINTS:
        positions = [gemmi.Position(*point) for point in points]
        expected = np.degrees(gemmi.calculate_dihedral(*positions))
        np.testing.assert_allclose(dihedrals(*points), expected, atol=1e-9)
        expected = np.degrees(gemmi.calculate_angle(*positions[:3]))
        np.testing.assert_allclose(angles(*points[:3]), expected, atol=1e-9)


def test_differences_of_angles_take_the_short_way_round() -> None:
    assert angle_difference(np.array([170.0, -170.0, 10.0]), np.array([-170.0, 170.0, 30.0])).tolist() == [
        -20.0,
        20.0,
        -20.0,
    ]


def test_frames_have_their_axes_through_the_points() -> None:
    a, b, c = POINTS[:, 0], POINTS[:, 1], POINTS[:, 2]
    rotation, origin = axis_frames(a, b, c)
    np.testing.assert_allclose(
        rotation @ rotation.transpose(0, 2, 1), np.broadcast_to(np.eye(3), (50, 3, 3)), atol=1e-12
    )
    np.testing.assert_allclose(np.linalg.det(rotation), np.ones(50))
    local_a, local_b = (np.einsum("kji,kj->ki", rotation, point - origin) for point in (a, b))
    np.testing.assert_allclose(local_b[:, 1:], 0, atol=1e-12)
    assert (local_b[:, 0] < 0).all()
    assert (local_a[:, 1] > 0).all()
    np.testing.assert_allclose(local_a[:, 2], 0, atol=1e-12)
    collinear, _ = axis_frames(*np.array([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]]))
    assert collinear.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_torsions_are_undefined_at_ends_gaps_and_missing_atoms() -> None:
    protein = helix("AAAAA", "AA")
    numbers = protein.residue_index.copy()
    numbers[3:5] += 1
    tied = follows(protein.chain_index, numbers)
    assert tied.tolist() == [False, True, True, False, True, False, True]
    torsions = backbone_torsions(protein.atom_positions, protein.atom_mask, tied)
    assert np.isfinite(torsions[:, 0]).tolist() == tied.tolist()
    assert np.isfinite(torsions[:, 1]).tolist() == [True, True, False, True, False, True, False]
    np.testing.assert_allclose(torsions[tied, 0], -60, atol=0.5)
    np.testing.assert_allclose(torsions[:-1][tied[1:], 1], -45, atol=0.5)
    mask = protein.atom_mask.copy()
    mask[1, 2] = 0
    torsions = backbone_torsions(protein.atom_positions, mask, tied)
    assert np.isfinite(torsions[:3]).tolist() == [[False, True], [False, False], [False, False]]
