"""The landscape of an ensemble."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastfold.products.ensemble import pictures
from fastfold.products.ensemble.pictures import landscape
from fastfold.protein.labels import AuthorNames

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


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that are drawn, in place of their bytes."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "to_png", lambda figure: drawn.append(figure) or b"")
    return drawn


def _clusters() -> Any:
    """Twelve samples in clusters one to thirteen, of which the last has the colour of the first."""
    clusters = np.array([*range(1, 12), 13])
    components = np.random.default_rng(1).normal(size=(12, 3))
    return SimpleNamespace(
        clusters=clusters,
        components=components,
        variance=np.array([0.5, 0.25, 0.125]),
        representatives=[2, 0],
        fluctuation=np.array([1.0, 2.0, 3.0]),
    )


def test_pairs_are_drawn_with_borders_between_clusters(figures: list[Any]) -> None:
    scores = np.arange(16.0).reshape(4, 4)
    analysis: Any = SimpleNamespace(clusters=np.array([2, 1, 1, 3]), tm_score=scores / 16, rmsd=scores)
    pictures.pairs_png(analysis, title="t")
    left, right = figures[0].axes[:2]
    assert (left.images[0].get_clim(), right.images[0].get_clim()) == ((0.0, 1.0), (0.0, 15.0))
    for axis in (left, right):
        places = [tuple(map(float, line.get_xdata())) for line in axis.lines]
        assert places == [(1.5, 1.5), (0.0, 1.0), (2.5, 2.5), (0.0, 1.0)]
        assert [line.get_ydata()[0] for line in axis.lines[1::2]] == [1.5, 2.5]


def test_samples_are_drawn_over_two_components_in_colours_of_clusters(figures: list[Any]) -> None:
    analysis = _clusters()
    pictures.landscape_png(analysis, title="t")
    analysis.components, analysis.variance = analysis.components[:, :1], np.array([0.75])
    pictures.landscape_png(analysis, title="t")
    axis, line = figures[0].axes[0], figures[1].axes[0]
    points = _clusters().components
    spots = [c for c in axis.collections if len(c.get_offsets()) and "Path" in type(c).__name__]
    spots = [c for c in spots if c.get_sizes().size and c.get_sizes()[0] == 14]
    drawn = {tuple(np.round(spot, 9)) for c in spots for spot in np.asarray(c.get_offsets())}
    assert drawn == {tuple(np.round(point[:2], 9)) for point in points}
    from matplotlib.colors import to_rgb

    colors = [tuple(c.get_facecolor()[0][:3]) for c in spots]
    assert colors[:11] == [pytest.approx(to_rgb(one)) for one in pictures.CHAIN_COLORS[:11]]
    assert colors[-1] == pytest.approx(to_rgb(pictures.CHAIN_COLORS[0]))
    assert [(text.get_text(), *text.xy) for text in axis.texts] == [
        ("1", *points[2, :2]),
        ("2", *points[0, :2]),
    ]
    assert {text.xyann for text in axis.texts} == {
        (5, 5)
    }  # to the right of the point and above it, in points
    assert axis.get_xlabel() == "component 1 (Å, 50% of the variance)"
    assert axis.get_ylabel() == "component 2 (Å, 25% of the variance)"
    assert len(figures[0].axes) == 2  # with a scale of the landscape
    ticks = figures[0].axes[1].get_ylim()
    assert ticks == (0.0, 6.0)
    # One component lies on a line, which has no landscape.
    assert len(figures[1].axes) == 1
    assert line.get_xlabel() == "component 1 (Å, 75% of the variance)"
    assert line.get_ylabel() == "component 2 (Å, 0% of the variance)"
    assert {float(spot[1]) for c in line.collections for spot in np.asarray(c.get_offsets())} == {0.0}


def test_the_landscape_reaches_a_fifth_beyond_the_samples() -> None:
    points = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 5.0], [10.0, 5.0]])
    found = landscape(points)
    assert found is not None
    x, y, values = found
    assert (x[0], x[-1], y[0], y[-1]) == pytest.approx((-2.0, 12.0, -1.0, 6.0))
    assert values.shape == (len(y), len(x)) == (120, 120)
    from scipy.stats import gaussian_kde

    kernel = gaussian_kde(points.T)
    expected = -np.log(
        kernel([[x[7]], [y[50]]])[0] / kernel(np.stack(np.meshgrid(x, y)).reshape(2, -1)).max()
    )
    assert values[50, 7] == pytest.approx(min(expected, 6.0))


def test_fluctuations_are_drawn_at_their_residues(figures: list[Any]) -> None:
    """Ticks have the numbers of the files, and chains their names."""
    ensemble: Any = SimpleNamespace(
        present=np.array([0, 2, 4]),
        lengths=[3, 2],
        numbers=np.array([5, 6, 7, 1, 2]),
        names=AuthorNames(("H", "L"), ("52A", "53", "54", "1", "2")),
    )
    pictures.fluctuation_png(ensemble, _clusters(), title="t")
    (axis,) = figures[0].axes
    line = axis.lines[0]
    assert line.get_xdata().tolist() == [1, 2, 3, 4, 5]
    assert np.array_equal(line.get_ydata(), [1.0, np.nan, 2.0, np.nan, 3.0], equal_nan=True)
    assert (axis.get_xlim(), axis.get_ylim()[0]) == ((0.5, 5.5), 0.0)
    assert axis.lines[1].get_xdata()[0] == 3.5
    assert axis.get_xticklabels()[0].get_text() == "52A"
    assert [text.get_text() for text in axis.texts] == ["H", "L"]


@pytest.mark.parametrize("count", [1, 2])
def test_agreement_with_states_is_drawn(count: int, figures: list[Any]) -> None:
    scores = [np.linspace(0.1, 0.9, 12), np.linspace(0.8, 0.2, 12)]
    states: Any = [
        SimpleNamespace(name=name * 30, tm_score=tm) for name, tm in zip(("ab", "cd"), scores, strict=True)
    ]
    plddt = np.linspace(50, 90, 12)
    pictures.states_png(_clusters(), states[:count], plddt, title="t")
    (axis,) = figures[0].axes
    (spots,) = axis.collections
    expected = np.stack([scores[0], plddt if count == 1 else scores[1]], 1)
    assert np.allclose(spots.get_offsets(), expected)
    assert (axis.get_xlim(), axis.get_ylim()) == ((0, 1.02), (0, 102 if count == 1 else 1.02))
    assert axis.get_xlabel() == "TM-score to " + "ab" * 20
    assert axis.get_ylabel() == ("mean pLDDT" if count == 1 else "TM-score to " + "cd" * 20)
    from matplotlib.colors import to_rgb

    assert tuple(spots.get_facecolors()[-1][:3]) == pytest.approx(to_rgb(pictures.CHAIN_COLORS[0]))
    assert tuple(spots.get_facecolors()[3][:3]) == pytest.approx(to_rgb(pictures.CHAIN_COLORS[3]))
