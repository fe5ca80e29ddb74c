"""Energies of overlaps are sums over pairs of atoms, with the radii of their elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.side_chains.clashes import CONTACT_REACH, RADII, contact_points, overlap_energies
from fastfold.protein.side_chains.rings import ring_slots
from tests.helpers.peptides import helix

CB, N, OG, SG = (rc.atom_order[name] for name in ("CB", "N", "OG", "SG"))


def pair_energy(first: int, second: int, distance: float) -> float:
    one, kind = contact_points(rc.restype_order["S"], [first], np.zeros((1, 1, 3)), {})
    other, other_kind = contact_points(rc.restype_order["S"], [second], np.zeros((1, 1, 3)), {})
    return float(overlap_energies(one, kind, other + np.array([distance, 0, 0]), other_kind)[0, 0])


@pytest.mark.parametrize(("first", "second"), list(itertools.product([CB, N, OG, SG], repeat=2)))
def test_two_atoms_overlap_from_the_sum_of_their_radii(first: int, second: int) -> None:
    contact = RADII[rc.atom_types[first][0]] + RADII[rc.atom_types[second][0]]
    assert contact <= CONTACT_REACH
    assert pair_energy(first, second, contact + 0.01) == 0.0
    at_90, at_80 = (pair_energy(first, second, share * contact) for share in (0.9, 0.8))
    assert at_90 == pytest.approx(3.5, rel=1e-3)
    assert at_80 == pytest.approx(7.0, rel=1e-3)


def test_energies_of_rotamers_are_sums_over_their_points() -> None:
    generator = np.random.default_rng(0)
    slots, others = [CB, OG], [N, SG, CB]
    one, kinds = contact_points(rc.restype_order["S"], slots, generator.normal(size=(4, 2, 3)), {})
    two, other_kinds = contact_points(rc.restype_order["C"], others, generator.normal(size=(5, 3, 3)), {})
    found = overlap_energies(one, kinds, two, other_kinds)
    for k, m in itertools.product(range(4), range(5)):
        total = sum(
            pair_energy(a, b, float(np.linalg.norm(one[k, i] - two[m, j])))
            for (i, a), (j, b) in itertools.product(enumerate(slots), enumerate(others))
        )
        assert found[k, m] == pytest.approx(total, rel=1e-4, abs=1e-4)


def test_centres_of_rings_repel_atoms_which_their_corners_would_not_reach() -> None:
    protein = helix("W")
    aatype, rings = int(protein.aatype[0]), ring_slots(int(protein.aatype[0]))
    slots = sorted({slot for ring in rings for slot in ring} - {rc.atom_order["CG"]})
    atoms = protein.atom_positions[0].astype(float)
    alone, _ = contact_points(aatype, slots, atoms[slots][None], {})
    assert len(alone[0]) == len(slots) + 1  # the ring without CG
    points, kinds = contact_points(
        aatype, slots, atoms[slots][None], {rc.atom_order["CG"]: atoms[rc.atom_order["CG"]]}
    )
    centers = [atoms[ring].mean(0) for ring in rings]
    np.testing.assert_allclose(points[0, len(slots) :], centers, atol=1e-9)
    probe, probe_kind = contact_points(aatype, [CB], centers[1][None, None], {})
    with_center = overlap_energies(points, kinds, probe, probe_kind)
    without = overlap_energies(points[:, : len(slots)], kinds[: len(slots)], probe, probe_kind)
    assert with_center[0, 0] > without[0, 0] + 30
