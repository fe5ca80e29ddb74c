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
