"""The landscape of an ensemble."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastfold.products.ensemble import pictures
from fastfold.products.ensemble.pictures import landscape

# Not imported by the process that runs other tests.
pytestmark = pytest.mark.skipif(find_spec("scipy") is None, reason="needs SciPy")


def test_the_landscape_is_lowest_where_samples_are():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(0, 0.3, (60, 2)), rng.normal((8, 4), 0.3, (20, 2))])
    found = landscape(points)
    assert found is not None
    x, y, values = found
    row, column = np.unravel_index(values.argmin(), values.shape)
    assert values.min() == 0
    assert values.max() <= 6
    assert np.hypot(x[column], y[row]) < 0.6
    second = values[np.abs(y - 4).argmin(), np.abs(x - 8).argmin()]
    assert np.log(2) < second < np.log(4.5)


def test_points_without_a_plane_have_no_landscape():
    assert landscape(np.zeros((6, 2))) is None
    assert landscape(np.stack([np.arange(6.0), 2 * np.arange(6.0)], 1)) is None
    assert landscape(np.random.default_rng(0).normal(size=(3, 2))) is None


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_scores_of_pairs_fill_two_equal_panels_in_the_order_of_clusters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(pictures, "to_png", lambda figure: figures.append(figure) or b"")
    scores = np.arange(9.0).reshape(3, 3)
    analysis: Any = SimpleNamespace(clusters=np.array([2, 1, 1]), tm_score=scores / 9, rmsd=scores)
    pictures.pairs_png(analysis, title="t")
    left, right = figures[0].axes[:2]
    assert list(left.get_gridspec().get_width_ratios()) == [1, 1]
    assert left.get_position().width == pytest.approx(right.get_position().width, rel=0.05)
    order = [1, 2, 0]
    assert np.array_equal(right.images[0].get_array(), scores[np.ix_(order, order)])
