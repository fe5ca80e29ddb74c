"""A bond through a ring is named, and one beside it is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import follows
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains.rings import RINGS, PiercedRing, pierced_rings, ring_slots
from tests.helpers.peptides import helix

CB, CA, SG = (rc.atom_order[name] for name in ("CB", "CA", "SG"))


def rings(protein: Protein) -> tuple[PiercedRing, ...]:
    tied = follows(protein.chain_index, protein.residue_index)
    return pierced_rings(protein.atom_positions, protein.atom_mask, protein.aatype, tied)


def ring_and_bond(letter: str, along: float, across: float) -> Protein:
    """Return a residue, and alanine's CA and CB 0.75 Å below and above a point of the plane of its last ring.

    The point is ``across`` times the way from the centre to the edge of the ring's third and fourth atoms. The bond is
    moved by ``along`` Å along the ring's normal.
    """
    protein = helix(letter, "A", apart=40.0)
    ring = protein.atom_positions[0, ring_slots(int(protein.aatype[0]))[-1]].astype(float)
    center = ring.mean(0)
    normal = np.cross(ring[0] - center, ring[1] - center)
    normal /= np.linalg.norm(normal)
    point = center + across * (ring[2:4].mean(0) - center) + along * normal
    xyz, mask = protein.atom_positions.copy(), protein.atom_mask.copy()
    mask[1] = 0
    xyz[1, CA], xyz[1, CB], mask[1, [CA, CB]] = point - 0.75 * normal, point + 0.75 * normal, 1
    return replace(protein, atom_positions=xyz, atom_mask=mask)


@pytest.mark.parametrize("letter", RINGS)
@pytest.mark.parametrize(
    ("along", "across", "is_pierced"),
    [(0.0, 0.0, True), (0.7, 0.95, True), (0.0, 1.05, False), (0.8, 0.0, False), (-0.8, 0.0, False)],
)
def test_a_bond_pierces_a_ring_inside_its_edges_and_at_its_height(
    letter: str, along: float, across: float, is_pierced: bool
) -> None:
    protein = ring_and_bond(letter, along, across)
    slots = tuple(ring_slots(int(protein.aatype[0]))[-1])
    expected = (PiercedRing(0, slots, ((1, CA), (1, CB))),) if is_pierced else ()
    assert rings(protein) == expected


def test_points_in_a_hexagon_agree_with_its_six_half_planes() -> None:
    generator = np.random.default_rng(0)
    pierced = []
    for angle, radius in zip(generator.uniform(0, 2 * np.pi, 25), generator.uniform(0, 2, 25), strict=True):
        protein = helix("F", "A", apart=40.0)
        ring = protein.atom_positions[0, ring_slots(int(protein.aatype[0]))[0]].astype(float)
        center = ring.mean(0)
        x = (ring[0] - center) / np.linalg.norm(ring[0] - center)
        normal = np.cross(x, ring[1] - center)
        normal /= np.linalg.norm(normal)
        y = np.cross(normal, x)
        point = center + radius * (np.cos(angle) * x + np.sin(angle) * y)
        edges = np.roll(ring, -1, 0) - ring
        inside = bool((np.cross(edges, point - ring) @ normal > 0).all())
        xyz, mask = protein.atom_positions.copy(), protein.atom_mask.copy()
        mask[1] = 0
        xyz[1, CA], xyz[1, CB], mask[1, [CA, CB]] = point - 0.3 * normal, point + 1.2 * normal, 1
        assert bool(rings(replace(protein, atom_positions=xyz, atom_mask=mask))) == inside
        pierced.append(inside)
    assert 5 < sum(pierced) < 20


def test_peptide_and_disulfide_bonds_count_and_long_distances_do_not() -> None:
    protein = helix("F", "AA", "CC", apart=40.0)
    ring = protein.atom_positions[0, ring_slots(int(protein.aatype[0]))[0]].astype(float)
    center = ring.mean(0)
    normal = np.cross(ring[0] - center, ring[1] - center)
    normal /= np.linalg.norm(normal)
    c, n = rc.atom_order["C"], rc.atom_order["N"]
    for first, second, half, is_pierced in (
        ((1, c), (2, n), 0.66, True),
        ((3, SG), (4, SG), 1.02, True),
        ((1, c), (2, n), 1.5, False),
        ((2, c), (3, n), 0.66, False),  # of two chains
    ):
        xyz, mask = protein.atom_positions.copy(), protein.atom_mask.copy()
        mask[1:] = 0
        xyz[first], xyz[second] = center - half * normal, center + half * normal
        mask[first] = mask[second] = 1
        assert [one.bond for one in rings(replace(protein, atom_positions=xyz, atom_mask=mask))] == [
            (first, second)
        ] * is_pierced


def test_incomplete_rings_and_ordinary_peptides_have_none() -> None:
    protein = ring_and_bond("W", 0.0, 0.0)
    mask = protein.atom_mask.copy()
    mask[0, rc.atom_order["CH2"]] = 0
    assert rings(replace(protein, atom_mask=mask)) == ()
    assert rings(helix("ACDEFGHIKLMNPQRSTVWY")) == ()
