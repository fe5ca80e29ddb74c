"""Energies of candidates with fixed atoms and with each other are those of the atoms that are not next to them."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.side_chains.build import BACKBONE
from fastfold.protein.side_chains.candidates import RotamerCandidates, side_chain_candidates
from fastfold.protein.side_chains.clashes import RADII
from fastfold.protein.side_chains.overlaps import pair_energies, with_fixed_atoms
from tests.helpers.peptides import helix

OG, CB = rc.atom_order["OG"], rc.atom_order["CB"]
PROTEIN = helix("ASA", "ASA")
XYZ = PROTEIN.atom_positions.astype(np.float64)
XYZ[3:] += XYZ[1, CB] + 2.0 - XYZ[4, CB]  # near enough for overlaps
KNOWN = (PROTEIN.atom_mask > 0.5) & np.isin(np.arange(rc.atom_type_num), BACKBONE)
TIED = np.array([False, True, True] * 2)


def serine(residue: int) -> RotamerCandidates:
    torsions = np.full((len(XYZ), 2), [-60.0, -45.0])
    return side_chain_candidates([residue], XYZ, KNOWN, PROTEIN.aatype, torsions)[0]


def overlap(first: np.ndarray, second: np.ndarray, contact: float) -> float:
    return 35.0 * max(0.0, 1.0 - float(np.linalg.norm(first - second)) / contact)


def test_fixed_atoms_count_except_those_of_the_residue_and_next_to_it() -> None:
    one = serine(1)
    counted = KNOWN.copy()
    counted[1] = counted[0, rc.atom_order["C"]] = counted[2, rc.atom_order["N"]] = False
    expected = [
        energy
        + sum(
            overlap(points[0], XYZ[i, slot], RADII["O"] + RADII[rc.atom_types[slot][0]])
            for i, slot in np.argwhere(counted)
        )
        for energy, points in zip(one.energies, one.points, strict=True)
    ]
    (found,) = with_fixed_atoms([one], XYZ, KNOWN, PROTEIN.aatype, TIED, np.inf)
    np.testing.assert_allclose(found.energies, expected, atol=1e-3)
    assert not np.allclose(found.energies, one.energies)
    (fewer,) = with_fixed_atoms([one], XYZ, KNOWN, PROTEIN.aatype, TIED, 0.0)
    assert len(fewer.energies) == 1
    assert fewer.energies[0] == pytest.approx(min(expected), abs=1e-3)


def test_pairs_of_candidates_have_the_overlaps_of_their_atoms() -> None:
    first, second = serine(1), serine(4)
    near = RotamerCandidates(
        4, second.slots, second.points - XYZ[4, CB] + XYZ[1, CB] + 1.5, second.kinds, second.energies
    )
    moved = XYZ.copy()
    moved[4, CB] = XYZ[1, CB] + 1.5
    pairs = pair_energies([first, near], moved)
    expected = [[overlap(a[0], b[0], 2 * RADII["O"]) for b in near.points] for a in first.points]
    np.testing.assert_allclose(pairs[0, 1], expected, atol=1e-3)
    far = RotamerCandidates(4, near.slots, near.points + 100.0, near.kinds, near.energies)
    moved[4] += 100.0
    assert pair_energies([first, far], moved) == {}
