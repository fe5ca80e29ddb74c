"""Caps continue a residue's backbone as trans peptides, away from other atoms."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.inference.relax.caps import acetyl, methylamide
from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import angles, dihedrals
from tests.helpers.peptides import helix

N, CA = (rc.atom_order[name] for name in ("N", "CA"))


def residue() -> np.ndarray:
    return helix("AAA").atom_positions[1].astype(np.float64)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b))


def test_acetyl_is_the_end_of_a_trans_peptide() -> None:
    xyz, cap = residue(), acetyl(residue(), np.zeros((0, 3)))
    assert cap.residue == "ACE"
    carbon, methyl, oxygen = cap.atoms["C"], cap.atoms["CH3"], cap.atoms["O"]
    assert distance(carbon, xyz[N]) == pytest.approx(1.33)
    assert distance(carbon, methyl) == pytest.approx(1.52)
    assert distance(carbon, oxygen) == pytest.approx(1.23)
    assert angles(carbon, xyz[N], xyz[CA]) == pytest.approx(121.7)
    assert abs(dihedrals(methyl, carbon, xyz[N], xyz[CA])) == pytest.approx(180.0)
    assert dihedrals(oxygen, carbon, xyz[N], xyz[CA]) == pytest.approx(0.0, abs=1e-6)
    assert angles(oxygen, carbon, methyl) == pytest.approx(360.0 - 116.2 - 123.0)


def test_methylamide_is_where_the_next_residue_of_a_helix_begins() -> None:
    protein = helix("AAA")
    cap = methylamide(protein.atom_positions[1].astype(np.float64))
    assert cap.residue == "NME"
    assert distance(cap.atoms["N"], protein.atom_positions[2, N]) < 0.1
    assert distance(cap.atoms["C"], protein.atom_positions[2, CA]) < 0.2


def test_acetyl_is_where_other_atoms_leave_most_room() -> None:
    """Acetyl turns about the bond of N and CA, so its methyl is farthest from an atom across the axis."""
    xyz = residue()
    methyl = acetyl(xyz, np.zeros((0, 3))).atoms["CH3"]
    moved = acetyl(xyz, methyl[None])
    turned = dihedrals(methyl, xyz[N], xyz[CA], moved.atoms["CH3"])
    assert abs(turned) == pytest.approx(180.0)
