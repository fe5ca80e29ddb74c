"""Decoys of the benchmark: other folds with the bonds and angles of the native."""

from __future__ import annotations

import numpy as np

from benchmarks.decoys import spearman, turned
from tests.helpers.results import helix_prediction


def test_turns_keep_bonds_and_change_the_fold() -> None:
    native = helix_prediction("x", 20).atom_positions.astype(np.float64)
    decoy = turned(native, 3, 30.0, np.random.default_rng(0))
    bonds = (
        (0, 1, 0),
        (1, 2, 0),
        (2, 4, 0),
        (1, 3, 0),
        (2, 0, 1),
        (1, 1, 1),
    )  # C-N and CA-CA to the next residue
    for first, second, apart in bonds:
        lengths = [
            np.linalg.norm(x[apart:, second] - x[: len(x) - apart, first], axis=-1) for x in (decoy, native)
        ]
        np.testing.assert_allclose(*lengths, atol=1e-6)
    ends = [np.linalg.norm(x[-1, 1] - x[0, 1]) for x in (native, decoy)]
    assert abs(ends[0] - ends[1]) > 0.5


def test_rank_correlation() -> None:
    assert spearman([1.0, 2.0, 5.0], [3.0, 4.0, 9.0]) == 1.0
    assert spearman([1.0, 2.0, 3.0], [9.0, 4.0, 3.0]) == -1.0
