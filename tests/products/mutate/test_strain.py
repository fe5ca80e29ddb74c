"""Effective strain, compared with PDAnalysis and with its definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fastfold.products.mutate.table import NEIGHBORS_WITHIN, effective_strain

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def test_strain_equals_the_published_program() -> None:
    """One structure and one, and means of two and three."""
    first, second = (np.array(PUBLISHED[key]) for key in ("first", "second"))
    assert PUBLISHED["neighbours_within"] == NEIGHBORS_WITHIN
    np.testing.assert_allclose(effective_strain(first[:1], second[:1]), PUBLISHED["one_and_one"], atol=2e-6)
    np.testing.assert_allclose(effective_strain(first, second), PUBLISHED["two_and_three"], atol=2e-6)


def test_rigid_motions_are_no_strain_and_a_lone_residue_has_none() -> None:
    points = np.array(PUBLISHED["first"][0])
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    np.testing.assert_allclose(effective_strain(points[None], points[None] @ turn.T + 7.0), 0.0, atol=1e-9)
    far = np.concatenate([points, points[:1] + 500.0])[None]
    assert np.isnan(effective_strain(far, far)).tolist() == [False] * len(points) + [True]


def without(structures: np.ndarray, residue: int) -> np.ndarray:
    """The structures without the atom of a residue."""
    changed = structures.copy()
    changed[:, residue] = np.nan
    return changed


def test_a_residue_without_an_atom_is_no_neighbour() -> None:
    """Strains of the others are those without the residue, whether it lacks its atom in one structure or in all."""
    first, second = (np.array(PUBLISHED[key]) for key in ("first", "second"))
    for one, two in (
        (without(first, 7), without(second, 7)),
        (without(first[:1], 7), second[:1]),
        (first[:1], without(second[:1], 7)),
    ):
        strain = effective_strain(one, two)
        assert np.isnan(strain[7])
        expected = effective_strain(*(np.delete(group, 7, 1) for group in (one, two)))
        np.testing.assert_allclose(np.delete(strain, 7), expected, atol=1e-12)
