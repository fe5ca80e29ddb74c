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
