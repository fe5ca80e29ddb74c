"""Disulfide bonds by the backbone: bonds of closed form come back without their sulphurs, and no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import angles, backbone_torsions, dihedrals, follows
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains.disulfides import BOND_LENGTH, NEAR_SULPHURS, Disulfide, find_disulfides
from tests.helpers.peptides import helix

CA, CB, SG = (rc.atom_order[name] for name in ("CA", "CB", "SG"))
LENGTH, ANGLE = 2.04, np.radians(104.0)


def about(axis: np.ndarray, origin: np.ndarray, degrees: float, points: np.ndarray) -> np.ndarray:
    axis, arms, angle = axis / np.linalg.norm(axis), points - origin, np.radians(degrees)
    along = (arms @ axis)[..., None] * axis
    return origin + along + np.cos(angle) * (arms - along) + np.sin(angle) * np.cross(axis, arms)


def half_turn(about_axis: np.ndarray, through: np.ndarray, points: np.ndarray) -> np.ndarray:
    return about(about_axis, through, 180.0, points)


def bonded(length: float = LENGTH, dihedral: float = 90.0) -> Protein:
    """Return two peptides ACA whose sulphurs are bonded by a two-fold axis, with the dihedral angle about the bond.

    The second peptide is the first one turned by half a turn about an axis through the bond's middle, so the bond's
    length, its angles of 104 degrees and its dihedral are known in closed form.
    """
    protein = helix("ACA", "ACA")
    xyz = protein.atom_positions.astype(np.float64)
    beta, sulphur = xyz[1, CB], xyz[1, SG]
    arm = (beta - sulphur) / np.linalg.norm(beta - sulphur)
    # Of all bonds with this angle, chi2 of 100 degrees keeps the peptides apart.
    side = np.cross(arm, xyz[1, CA] - beta)
    across = about(arm, np.zeros(3), 10.0, side / np.linalg.norm(side))
    bond = np.cos(ANGLE) * arm + np.sin(ANGLE) * across
    middle = sulphur + 0.5 * length * bond
    beside = arm - (arm @ bond) * bond
    axis = about(bond, np.zeros(3), dihedral / 2, beside / np.linalg.norm(beside))
    xyz[3:] = half_turn(axis, middle, xyz[:3])
    return replace(protein, atom_positions=xyz)


def find(protein: Protein, *missing: int) -> tuple[Disulfide, ...]:
    mask = protein.atom_mask.copy()
    mask[list(missing), SG] = 0
    tied = follows(protein.chain_index, protein.residue_index)
    torsions = backbone_torsions(protein.atom_positions, mask, tied)
    return find_disulfides(
        protein.atom_positions, mask, protein.aatype, chain_index=protein.chain_index, torsions=torsions
    )


def pairs(protein: Protein, *missing: int) -> list[tuple[int, int]]:
    return [bond.residues for bond in find(protein, *missing)]


def test_the_construction_is_a_disulfide() -> None:
    xyz = bonded().atom_positions.astype(np.float64)
    b, s, t, c = xyz[1, CB], xyz[1, SG], xyz[4, SG], xyz[4, CB]
    assert np.linalg.norm(s - t) == pytest.approx(LENGTH, abs=1e-3)
    assert angles(b, s, t) == pytest.approx(104.0, abs=0.1)
    assert angles(c, t, s) == pytest.approx(104.0, abs=0.1)
    assert abs(dihedrals(b, s, t, c)) == pytest.approx(90.0, abs=0.1)


@pytest.mark.parametrize("missing", [(1,), (4,), (1, 4)])
def test_missing_sulphurs_of_a_bond_are_bonded_where_they_were(missing: tuple[int, ...]) -> None:
    protein = bonded()
    (bond,) = find(protein, *missing)
    assert bond.residues == (1, 4)
    assert np.linalg.norm(bond.sulphurs[0] - bond.sulphurs[1]) == pytest.approx(LENGTH, abs=0.15)
    np.testing.assert_allclose(bond.sulphurs, protein.atom_positions[[1, 4], SG], atol=0.6)
    for i, sulphur in zip(bond.residues, bond.sulphurs, strict=True):
        if i not in missing:
            np.testing.assert_array_equal(sulphur, protein.atom_positions[i, SG])


def test_no_bond_where_the_backbones_forbid_it() -> None:
    whole = bonded()
    for shift in (1.5, 3.0, -1.5):
        xyz = whole.atom_positions.copy()
        apart = xyz[4, CB] - xyz[1, CB]
        xyz[3:] += shift * apart / np.linalg.norm(apart)
        assert pairs(replace(whole, atom_positions=xyz), 1, 4) == []
    eclipsed = bonded(dihedral=5.0)
    assert pairs(eclipsed, 1) == []
    serine = replace(whole, aatype=np.where(np.arange(6) == 4, rc.restype_order["S"], whole.aatype))
    assert pairs(serine, 1, 4) == []


@pytest.mark.parametrize(("turn", "is_bonded"), [(0.0, True), (-10.0, True), (-30.0, False)])
def test_the_angle_at_either_sulphur_counts(turn: float, is_bonded: bool) -> None:
    protein = bonded()
    xyz = protein.atom_positions.astype(np.float64)
    axis = np.cross(xyz[4, CB] - xyz[4, SG], xyz[1, SG] - xyz[4, SG])
    xyz[3:] = about(axis, xyz[4, SG], turn, xyz[3:])
    turned = replace(protein, atom_positions=xyz)
    assert pairs(turned, 1) == [(1, 4)] * is_bonded
    mirrored = replace(protein, atom_positions=np.concatenate([xyz[3:], xyz[:3]]))
    assert pairs(mirrored, 4) == [(1, 4)] * is_bonded


def test_known_sulphurs_are_bonded_by_their_distance() -> None:
    assert pairs(bonded()) == [(1, 4)]
    assert pairs(bonded(dihedral=5.0)) == [(1, 4)]
    assert pairs(bonded(length=2.6)) == [(1, 4)]
    assert pairs(bonded(length=NEAR_SULPHURS + 0.05)) == []


def test_near_sulphurs_are_not_bonded_if_the_backbones_forbid_it() -> None:
    protein = bonded()
    xyz = protein.atom_positions.copy()
    away = xyz[4, SG] - xyz[1, SG]
    away /= np.linalg.norm(away)
    for distance, is_bonded in ((BOND_LENGTH - 0.05, True), (BOND_LENGTH + 0.05, False)):
        moved = xyz.copy()
        moved[3:] += 5.0 * away
        moved[4, SG] = xyz[1, SG] + distance * away
        assert (pairs(replace(protein, atom_positions=moved)) == [(1, 4)]) == is_bonded


def test_two_pairs_around_a_metal_are_not_bonded() -> None:
    """The bonds of cysteines next to each other are allowed, and those of pairs C-x-C are not."""
    first = bonded()
    apart = first.atom_positions[4, CB] - first.atom_positions[1, CB]
    aside = np.cross(apart, [1.0, 0.0, 0.0])
    aside *= 5.0 / np.linalg.norm(aside)
    chains = (first.atom_positions[:3], first.atom_positions[3:])
    for step, count in ((2, 0), (1, 2)):
        xyz = np.zeros((2 * (step + 1), 37, 3), np.float32)
        mask = np.zeros((2 * (step + 1), 37), np.float32)
        for number, atoms in enumerate(chains):
            for place, shift in ((number * (step + 1), 0.0), (number * (step + 1) + step, aside)):
                xyz[place] = atoms[1] + np.float32(shift)
                mask[place] = first.atom_mask[1]
        aatype = np.where(mask.any(-1), rc.restype_order["C"], rc.restype_order["A"])
        rows = np.repeat([0, 1], step + 1)
        mask[:, SG] = 0
        found = find_disulfides(xyz, mask, aatype, chain_index=rows, torsions=np.full((len(xyz), 2), np.nan))
        assert len(found) == count


def test_a_cysteine_has_one_bond_and_known_bonds_come_first() -> None:
    first, other = bonded(), helix("ACA")
    protein = Protein(
        atom_positions=np.concatenate([first.atom_positions, first.atom_positions[3:]]),
        atom_mask=np.concatenate([first.atom_mask, other.atom_mask]),
        aatype=np.concatenate([first.aatype, other.aatype]),
        residue_index=np.tile([1, 2, 3], 3),
        chain_index=np.repeat([0, 1, 2], 3),
        b_factors=np.zeros((9, 37)),
    )
    assert pairs(protein, 4) == [(1, 7)]
    assert pairs(protein, 7) == [(1, 4)]
    assert pairs(protein, 1, 4, 7) == [(1, 4)]
