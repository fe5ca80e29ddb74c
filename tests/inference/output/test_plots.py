"""Plots are the same bytes for the same input, and take any length and any name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa
from fastfold.data.msa.sampling import alignment_coverage
from fastfold.inference.output import plots
from fastfold.inference.output.plots import BANDS, confidence_png, coverage_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def size(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG file."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("residues", [1, 2, 1030])
def test_any_length_is_drawn_and_aligned_errors_take_a_panel_of_their_own(residues: int) -> None:
    plddt, chains = np.full(residues, 70.0), np.zeros(residues, np.int32)
    alone = confidence_png(plddt, chains)
    both = confidence_png(plddt, chains, pae=np.ones((residues, residues)), max_pae=31.75)
    assert size(both)[0] > size(alone)[0]
    assert size(both)[1] == size(alone)[1]


def test_the_same_input_gives_the_same_bytes_and_names_are_not_formulas() -> None:
    plddt, chains = np.linspace(0, 100, 9), np.repeat([0, 1], [4, 5])
    plot = confidence_png(plddt, chains, title="$a_")
    assert plot == confidence_png(plddt, chains, title="$a_")
    assert plot != confidence_png(plddt[::-1], chains, title="$a_")


def texts_of(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], bytes]) -> list[str]:
    """Everything that is written in a plot."""
    from matplotlib.text import Text

    found: list[str] = []
    original = plots.to_png

    def reading(figure: Figure) -> bytes:
        found.extend(text.get_text() for text in figure.findobj(Text) if text.get_visible())
        return original(figure)

    monkeypatch.setattr(plots, "to_png", reading)
    draw()
    return found


def test_scores_bands_and_chains_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chain is numbered from 1."""
    plddt, chains = np.linspace(0, 100, 150), np.repeat([0, 1, 2], [60, 50, 40])
    pae = np.ones((150, 150))
    found = texts_of(
        monkeypatch,
        lambda: confidence_png(plddt, chains, pae=pae, max_pae=31.75, title="t", ptm=0.5, iptm=0.25),
    )
    assert "t\nmean pLDDT 50.0 · pTM 0.50 · ipTM 0.25" in found
    bands = {f"{band.name} ({band.low} to {band.high})" for band in BANDS}
    assert {"A", "B", "C", "very high (90 to 100)"} | bands <= set(found)
    assert found.count("1") == 3 * 3  # on the axis of residues, and on both of the aligned errors
    assert found.count("150") == found.count("120") == 0


def test_ticks_number_each_chain_from_one() -> None:
    assert plots._chain_ticks([10]) == ([*range(1, 11)], [str(n) for n in range(1, 11)])
    ticks, labels = plots._chain_ticks([120, 85, 40])
    assert dict(zip(ticks, labels, strict=True)) == {
        1: "1",
        50: "50",
        100: "100",
        121: "1",
        170: "50",
        206: "1",
    }
    # Chains of a few residues in a large complex do not write over each other.
    ticks, labels = plots._chain_ticks([1] * 100 + [900])
    assert np.diff(ticks).min() >= 40


@pytest.mark.parametrize("seed", range(40))
def test_ticks_are_first_residues_and_round_numbers_between_them(seed: int) -> None:
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 40, draws.integers(1, 12)).tolist()
    parts = [np.cumsum(draws.choice([1, 1, 1, 1, 1, 1, 1, 9], length)) for length in lengths]
    numbers = None if seed % 4 == 0 else np.concatenate(parts)
    parts = [np.arange(1, length + 1) for length in lengths] if numbers is None else parts
    places, labels = plots._chain_ticks(lengths, numbers)
    residues = [(int(n), n - 1 not in part) for part in parts for n in part]
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if 10 * step >= len(residues))
    room, expected = 0.4 * step, dict[int, int]()
    heads = [place for place, (_, is_first) in enumerate(residues, 1) if is_first]
    for place in heads:
        if not expected or place - max(expected) >= room:
            expected[place] = residues[place - 1][0]
    shown = list(expected)
    for place, (number, _) in enumerate(residues, 1):
        after = min((head for head in shown if head > place), default=np.inf)
        before = max(head for head in heads if head <= place)
        if number % step == 0 and place - before >= room and after - place >= room:
            expected[place] = number
    assert dict(zip(places, map(int, labels), strict=True)) == expected


@pytest.mark.parametrize(("copies", "top"), [(0, 1.05), (3, 4.2)])
def test_coverage_reaches_the_deepest_residue_and_a_lone_query_is_one_row(
    copies: int, top: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "to_png", lambda figure: figures.append(figure) or b"")
    rows = ("MKVLA", *("MKVL-", "AKVLA", "MK---")[:copies])
    msa = Msa(rows, np.zeros((len(rows), 5), np.int32), ("q",) * len(rows))
    coverage_png(alignment_coverage([([msa], [])] if copies else [([], [])], lengths=[5]))
    assert figures[0].axes[0].get_ylim() == pytest.approx((0.0, top))


def test_coverage_is_drawn_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("MKTAY", "MKTA-", "--TAY")
    msa = Msa(rows, np.zeros((3, 5), np.int32), rows)
    coverage = alignment_coverage([([msa], []), ([], [])], lengths=[5, 1])
    found = texts_of(monkeypatch, lambda: coverage_png(coverage, title="$t_"))
    assert "$t_\nalignment rows: 3, 1" in found
    assert {"A", "B", "0% to 20%", "80% to 100%"} <= set(found)
    assert coverage_png(coverage) == coverage_png(coverage)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that are drawn, in place of their bytes."""
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "to_png", lambda figure: drawn.append(figure) or b"")
    return drawn


def lines_of(axis: Any) -> list[tuple[list[float], list[float]]]:
    """Points of each line, horizontal and vertical ones with shares of the axis included."""
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in axis.lines]


def borders(axis: Any, *, vertical: bool = True) -> list[float]:
    """Places of the lines across the whole axis."""
    lines = [(x, y) if vertical else (y, x) for x, y in lines_of(axis)]
    return [at[0] for at, across in lines if across == [0.0, 1.0] and len(set(at)) == 1]


def texts(axis: Any) -> dict[str, tuple[float, float]]:
    """Texts inside of an axis by their places."""
    return {text.get_text(): text.get_position() for text in axis.texts}


def test_every_part_of_the_plot_of_confidence_is_in_its_place(figures: list[Any]) -> None:
    plddt, chains = np.linspace(0, 100, 30), np.repeat([0, 1], [18, 12])
    pae = np.arange(900.0).reshape(30, 30)
    confidence_png(plddt, chains, pae=pae, max_pae=31.75, title="t")
    (figure,) = figures
    assert (*figure.get_size_inches(), figure.dpi) == (12.6, 4.8, 150)
    left, right, bar = figure.axes
    assert (left.get_xlim(), left.get_ylim()) == ((0.5, 30.5), (0.0, 100.0))
    assert lines_of(left)[0] == (list(range(1, 31)), plddt.tolist())
    assert left.lines[0].get_marker() == "None"
    assert borders(left) == [18.5]
    names = {"A": pytest.approx((9.5, 1.01)), "B": pytest.approx((24.5, 1.01))}
    assert texts(left) == texts(right) == names
    bands = [
        (p.get_y(), p.get_y() + p.get_height(), p.get_facecolor()[:3], p.get_alpha()) for p in left.patches
    ]
    from matplotlib.colors import to_rgb

    assert bands == [(band.low, band.high, pytest.approx(to_rgb(band.color)), 0.25) for band in BANDS]
    assert left.get_legend().get_texts()[0].get_text() == "very high (90 to 100)"
    (image,) = right.images
    assert np.array_equal(image.get_array(), pae)
    assert (image.get_clim(), tuple(image.get_extent())) == ((0, 31.75), (0.5, 30.5, 30.5, 0.5))
    assert borders(right) == borders(right, vertical=False) == [18.5]
    assert (right.get_ylabel(), right.get_xlabel()) == ("aligned residue", "scored residue")
    assert bar.get_ylabel() == "aligned error (Å)"
    colors = [text.get_color() for text in left.texts]
    assert colors == list(plots.CHAIN_COLORS[:2])
    # Panels of three and two parts with margins in inches; lines of text and names of chains are above.
    boxes = [axis.get_position(original=True) for axis in (left, right)]
    assert list(left.get_gridspec().get_width_ratios()) == [3, 2]
    assert (boxes[1].x0 - boxes[0].x1) * 12.6 == pytest.approx(0.95)
    assert boxes[0].x0 * 12.6 == pytest.approx(0.56)
    assert (boxes[0].y0 * 4.8, (1 - boxes[0].y1) * 4.8) == pytest.approx((0.7, 0.2 + 2 * 0.16 + 0.18))


@pytest.mark.parametrize(("residues", "marker"), [(2, "."), (3, "None")])
def test_a_plot_of_one_chain_has_no_borders_and_a_few_residues_are_dots(
    residues: int, marker: str, figures: list[Any]
) -> None:
    confidence_png(np.full(residues, 70.0), np.zeros(residues, int))
    (axis,) = figures[0].axes
    assert axis.lines[0].get_marker() == marker
    assert texts(axis) == {}
    box = axis.get_position(original=True)
    assert figures[0].get_size_inches().tolist() == [7.4, 4.8]
    assert (box.x0 * 7.4, (1 - box.x1) * 7.4, (1 - box.y1) * 4.8) == pytest.approx((0.56, 0.2, 0.36))


def test_large_aligned_errors_are_thinned_and_many_chains_have_no_names(figures: list[Any]) -> None:
    n = 1025
    pae = np.arange(n, dtype=np.float32)[:, None] + np.zeros(n, np.float32)
    confidence_png(np.full(n, 50.0), np.arange(n) // 41, pae=pae, max_pae=None)
    confidence_png(np.full(27, 50.0), np.arange(27), pae=pae[:1024, :1024])
    (image,), (whole,) = figures[0].axes[1].images, figures[1].axes[1].images
    assert image.get_array()[:, 0].tolist() == list(range(0, n, 2))
    assert image.get_extent()[1] == n + 0.5
    assert whole.get_array().shape == (1024, 1024)
    assert list(texts(figures[0].axes[0]))[24] == "Y"
    assert texts(figures[1].axes[0]) == {}
    assert len(borders(figures[1].axes[0])) == 26
    # Colours begin again after twelve chains.
    colors = [text.get_color() for text in figures[0].axes[0].texts]
    assert colors[12:24] == colors[:12] == list(plots.CHAIN_COLORS)


def test_coverage_is_stacked_from_the_most_similar_rows(figures: list[Any]) -> None:
    rows = ("MKTAY", "MKTA-", "--TAY", "M----")
    msa = Msa(rows, np.zeros((4, 5), np.int32), rows)
    coverage = alignment_coverage([([msa], []), ([], [])], lengths=[5, 2])
    coverage_png(coverage)
    (axis,) = figures[0].axes
    depth = np.asarray(coverage["depth_by_identity"])[::-1].cumsum(0)
    assert (axis.get_xlim(), axis.get_ylim()) == ((0.5, 7.5), (0.0, pytest.approx(1.05 * 3)))
    assert borders(axis) == [5.5]
    assert len(axis.collections) == len(depth)
    for layer, tops in zip(axis.collections, depth, strict=True):
        corners = layer.get_paths()[0].vertices
        for residue, top in enumerate(tops, 1):
            inside = corners[(corners[:, 0] == residue - 0.5) | (corners[:, 0] == residue + 0.5)]
            assert top in inside[:, 1]
        assert corners[:, 0].min() == 0.5
        assert corners[:, 0].max() == 7.5
    assert depth[-1].tolist()[:3] == [3, 2, 3]
    legend = axis.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "0% to 20%", "20% to 40%", "40% to 60%", "60% to 80%", "80% to 100%",
    ]  # fmt: skip
    assert legend.get_title().get_text() == "identity to the query"
    from matplotlib.colors import to_hex

    faces = [to_hex(patch.get_facecolor()) for patch in legend.get_patches()]
    assert faces == list(plots.IDENTITY_COLORS)


def test_coverage_is_numbered_by_the_ranges_of_a_structure(figures: list[Any]) -> None:
    msa = Msa(("MKTAY",), np.zeros((1, 5), np.int32), ("q",))
    coverage = alignment_coverage([([msa], [])], lengths=[5])
    coverage_png(coverage | {"residue_ranges": [[[11, 13], [21, 22]]]})
    coverage_png(coverage | {"residue_ranges": [[[11, 13], [21, 22]]], "chain_ids": ["H"]})
    for figure in figures:
        (axis,) = figure.axes
        shown = dict(zip(axis.get_xticks(), (t.get_text() for t in axis.get_xticklabels()), strict=True))
        assert (shown[1], shown[4]) == ("11", "21")


def test_a_trajectory_is_drawn_by_step_with_its_stages(figures: list[Any]) -> None:
    plots.trajectory_png([3.0, 2.0, 1.0, 0.5], [40.0, 50.0, 60.0, 70.0], ["a", "a", "b", "c"])
    plots.trajectory_png([3.0, 2.0], [40.0, 50.0], ["a", "a"])
    left, right = figures[0].axes
    assert lines_of(left)[0] == ([1, 2, 3, 4], [3.0, 2.0, 1.0, 0.5])
    assert lines_of(right)[0] == ([1, 2, 3, 4], [40.0, 50.0, 60.0, 70.0])
    assert borders(left) == borders(right) == [2.5, 3.5]
    assert left.get_xlim() == right.get_xlim() == (0.5, 4.5)
    assert right.get_ylim() == (0, 100)
    assert (left.get_ylabel(), right.get_ylabel()) == ("loss", "mean pLDDT")
    assert left.lines[0].get_marker() == "None"
    assert {axis.lines[0].get_marker() for axis in figures[1].axes} == {"."}
    assert list(left.get_gridspec().get_width_ratios()) == [1, 1]


def test_a_scan_is_drawn_in_colours_around_zero_for_differences(figures: list[Any]) -> None:
    residues = [f"A{number}" for number in range(1, 402)]
    values = np.full((3, 401), np.nan)
    values[:, :3] = [[1, -2, 0.5], [0, 1, 1], [0.5, 0.5, 0.5]]
    panels = {"Δ pLDDT": values, "strain (Å)": np.abs(values), "nothing": np.full((3, 401), np.nan)}
    plots.scan_png(panels, residues, ["A", "C", "D"], [0, 1, 2] * 133 + [0, 1])
    plots.scan_png({"one": np.zeros((1, 2))}, ["A1", "A2"], ["A"], [0, 0])
    figure = figures[0]
    assert figure.get_size_inches().tolist() == [40.0, pytest.approx(3 * 3.6)]
    assert figures[1].get_size_inches().tolist() == [6.0, 3.6]
    first, second, third = figure.axes[:3]
    assert [axis.images[0].get_clim() for axis in (first, second, third)] == [(-2, 2), (0, 2), (0, 1)]
    assert [axis.images[0].get_cmap().name for axis in (first, second)] == ["RdBu", "viridis"]
    assert [axis.get_title() for axis in (first, second, third)] == list(panels)
    assert np.array_equal(first.images[0].get_array(), values, equal_nan=True)
    assert lines_of(first)[0] == (list(range(401)), ([0, 1, 2] * 134)[:401])
    # Every third name of 401 can be read; of two both.
    assert first.get_xticks().tolist() == list(range(0, 401, 3))
    assert [text.get_text() for text in first.get_xticklabels()][:3] == ["A1", "A4", "A7"]
    assert [text.get_text() for text in first.get_yticklabels()] == ["A", "C", "D"]
    assert [text.get_text() for text in figures[1].axes[0].get_xticklabels()] == ["A1", "A2"]
    assert figures[1].axes[0].images[0].get_clim() == (0, 1)


def test_ticks_number_parts_of_a_chain_and_keep_their_distance() -> None:
    """A chain of 1 to 30 and 101 to 130 without the residues between."""
    numbers = np.concatenate([np.arange(1, 31), np.arange(101, 131)])
    ticks, labels = plots._chain_ticks([60], numbers)
    shown = dict(zip(ticks, labels, strict=True))
    assert all(numbers[place - 1] == int(label) for place, label in shown.items())
    assert {1: "1", 10: "10", 20: "20", 31: "101", 40: "110", 50: "120", 60: "130"}.items() <= shown.items()
    assert np.diff(ticks).min() >= 4
    # Ten steps of 1, 2 or 5 times a power of ten reach over the axis.
    for total, step in ((10, 1), (11, 2), (20, 2), (21, 5), (50, 5), (51, 10), (101, 20), (501, 100)):
        places, _ = plots._chain_ticks([total])
        assert min(place for place in places if place > 1) == (step if step > 1 else 2)
        assert set(np.diff(places[1:])) == {step}
