"""Shape complementarity against sc-rs, an open implementation of the same paper."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.shape_complementarity import atom_radii, shape_complementarity
from tests.protein.metrics.interface.packed_helices import packed_helices


def test_packed_helices_have_the_values_of_sc_rs() -> None:
    found = shape_complementarity(*packed_helices())
    assert found is not None
    assert found.score == pytest.approx(0.4136, abs=0.01)
    assert found.distance == pytest.approx(0.8525, abs=0.01)
    assert found.area == pytest.approx(344.4, rel=0.04)


@pytest.mark.long
def test_order_and_place_do_not_matter() -> None:
    positions, mask, aatype, second = packed_helices()
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    here, there = (shape_complementarity(positions, mask, aatype, one) for one in (second, ~second))
    moved = shape_complementarity(positions @ turn + 20.0, mask, aatype, second)
    assert here is not None
    assert there is not None
    assert moved is not None
    assert here.score == pytest.approx(there.score, abs=1e-6)
    assert here.score == pytest.approx(moved.score, abs=0.02)


def test_molecules_that_do_not_touch_have_no_score() -> None:
    positions, mask, aatype, second = packed_helices()
    assert shape_complementarity(positions + 40.0 * second[:, None, None], mask, aatype, second) is None
    assert shape_complementarity(positions, mask, aatype, second | True) is None


def test_radii_cover_all_atoms() -> None:
    radii = atom_radii()
    for letter, aatype in rc.restype_order.items():
        for slot in np.flatnonzero(rc.restype_atom37_mask[aatype]):
            wanted = {"C": (1.8, 1.95), "N": (1.65, 1.75), "O": (1.6, 1.7), "S": (1.9, 1.9)}
            low, high = wanted[rc.atom_types[slot][0]]
            assert low <= radii[aatype, slot] <= high, (letter, rc.atom_types[slot])
    assert radii[rc.restype_order["V"], rc.atom_order["CB"]] == 1.85
