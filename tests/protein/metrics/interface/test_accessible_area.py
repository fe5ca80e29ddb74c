"""Accessible area against closed forms and FreeSASA."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.accessible_area import WATER, accessible_area, protor_radii
from tests.protein.metrics.interface.packed_helices import packed_helices


def test_the_area_of_two_spheres() -> None:
    """Two CA atoms hide a cap of each other."""
    positions, mask = np.zeros((2, 37, 3)), np.zeros((2, 37))
    mask[:, 1] = 1
    positions[1, 1, 2] = 3.0
    grown = 1.88 + WATER
    cap = 2 * np.pi * grown * (grown + 1.5)
    area = accessible_area(positions, mask, np.zeros(2, int))
    assert area[:, 1] == pytest.approx([cap, cap], rel=0.02)
    assert area.sum() == area[:, 1].sum()
    assert protor_radii()[rc.restype_order["F"], rc.atom_order["CZ"]] == 1.76


def test_areas_are_those_of_freesasa() -> None:
    """Of FreeSASA 2.2.1 with ProtOr radii and 200 slices (Lee & Richards)."""
    positions, mask, aatype, second = packed_helices()
    parts = [
        accessible_area(positions[x], mask[x], aatype[x]).sum() for x in (second, ~second, second | True)
    ]
    assert parts == pytest.approx([2520.97, 2520.97, 4048.50], rel=5e-3)
