"""Plots of a prediction: pLDDT along the chains, aligned error of all pairs, and coverage by the alignments.

matplotlib is imported on first use and without pyplot, so there are no windows and no global state.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fastfold.inference.output.style import (
    BANDS,
    CHAIN_COLOURS,
    FAINT,
    FONTS,
    IDENTITY_COLOURS,
    INK,
    PAE_COLOURS,
)
from fastfold.protein.labels import numbers_of_ranges, residue_ranges
from fastfold.protein.protein import chain_name

_MAX_PIXELS = 1_024
_MAX_CHAIN_NAMES = 26  #: Largest number of names above a plot


def confidence_png(
    plddt: np.ndarray,
    chain_index: np.ndarray,
    *,
    numbers: np.ndarray | None = None,
    pae: np.ndarray | None = None,
    max_pae: float | None = None,
    title: str = "",
    ptm: float | None = None,
    iptm: float | None = None,
) -> bytes:
    """Draw pLDDT per residue and, if given, the aligned error, with chains marked and numbered.

    Args:
        plddt: ``[N]``, 0 to 100.
        chain_index: ``[N]`` int: 0, ..., 0, 1, ..., 1, and so on.
        numbers: ``[N]`` int, residue numbers; None for 1, 2 and so on in each chain.
        pae: ``[N, N]`` in Å.
        max_pae: Upper end of the PAE scale, in Å.
        title: Text above the plot, followed by the scores.
        ptm: 0 to 1.
        iptm: 0 to 1.

    Returns:
        PNG file, the same bytes for the same input and matplotlib version.
    """
    lengths = np.bincount(np.asarray(chain_index)).tolist()
    scores = {"mean pLDDT": f"{float(np.mean(plddt, dtype=np.float64)):.1f}"}
    scores |= {name: f"{value:.2f}" for name, value in (("pTM", ptm), ("ipTM", iptm)) if value is not None}
    line = " · ".join(f"{name} {value}" for name, value in scores.items())
    width, panels = (7.4, [1]) if pae is None else (12.6, [3, 2])
    lines = [part for part in (title, line) if part]
    # Margins of their own, because searching for a layout takes a third of the time to draw, and a fold waits for it.
    top = 0.2 + 0.16 * len(lines) + (0.18 if len(lengths) > 1 else 0.0)
    margins = Margins(left=0.56, right=0.2 if pae is None else 0.4, bottom=0.7, top=top, between=0.95)
    with figure_in_style(width, 4.8, lines, panels, margins=margins) as (figure, axes):
        _draw_plddt(axes[0], plddt, lengths, numbers)
        if pae is not None:
            _draw_pae(figure, axes[1], pae, max_pae, lengths, numbers)
        return to_png(figure)


def coverage_png(coverage: Mapping[str, Any], *, title: str = "") -> bytes:
    """Draw the number of alignment rows that cover each residue, by identity to the query.

    The PNG file of a coverage (:func:`fastfold.data.msa.sampling.alignment_coverage`) has the same bytes for the same
    matplotlib version.
    """
    lengths, edges = coverage["chain_lengths"], coverage["identity_edges"]
    depth = np.asarray(coverage["depth_by_identity"])[::-1]  # the most similar rows at the bottom
    names = [f"{low:.0%} to {high:.0%}" for low, high in itertools.pairwise(edges)][::-1]
    line = f"alignment rows: {', '.join(f'{rows:,}' for rows in coverage['rows'])}"
    with figure_in_style(7.4, 4.8, [part for part in (title, line) if part], [1]) as (figure, (axis,)):
        # Steps, so that all residues have the same width.
        borders = np.arange(depth.shape[1] + 1) + 0.5
        values = np.concatenate([depth, depth[:, -1:]], 1)
        axis.stackplot(borders, values, labels=names, colors=IDENTITY_COLOURS[::-1], step="post", linewidth=0)
        axis.set(ylabel="rows without a gap", xlim=(0.5, sum(lengths) + 0.5))
        axis.set_ylim(0, 1.05 * max(1, int(depth.sum(0).max())))
        numbers = None
        if ranges := coverage.get("residue_ranges"):
            numbers = np.concatenate([numbers_of_ranges(*one) for one in zip(ranges, lengths, strict=True)])
        mark_chains(axis, lengths, numbers, colour=INK)
        handles, labels = axis.get_legend_handles_labels()
        _legend(axis, handles[::-1], labels[::-1], "identity to the query")
        return to_png(figure)


def trajectory_png(
    loss: Sequence[float], plddt: Sequence[float], stages: Sequence[str], *, title: str = ""
) -> bytes:
    """Draw loss and mean pLDDT (0 to 100) of a design's steps, with their stages.

    The PNG file has the same bytes for the same input and matplotlib version.
    """
    steps = np.arange(1, len(loss) + 1)
    with figure_in_style(12.6, 4.8, [title], [1, 1]) as (figure, axes):
        for axis, values, label in zip(axes, (loss, plddt), ("loss", "mean pLDDT"), strict=True):
            axis.plot(steps, values, color=INK, linewidth=0.9, marker="." if len(steps) < 3 else None)
            axis.set(xlabel="step", ylabel=label, xlim=(0.5, len(steps) + 0.5))
            for i in range(1, len(stages)):
                if stages[i] != stages[i - 1]:
                    axis.axvline(i + 0.5, color=FAINT, linewidth=0.8)
        axes[1].set_ylim(0, 100)
        return to_png(figure)


def scan_png(
    panels: Mapping[str, np.ndarray],
    residues: Sequence[str],
    letters: Sequence[str],
    wild_type: Sequence[int],
    *,
    title: str = "",
) -> bytes:
    """Draw heat maps of single mutants: a row for each new letter, a column for each residue.

    Args:
        panels: ``[L, M]`` values by label; NaN for mutants that were not folded. Labels with Δ have colours around 0.
        residues: ``M`` names of the residues.
        letters: ``L`` new letters.
        wild_type: ``M`` rows of the wild type's letters, which are marked.
        title: Text above the plot.

    Returns:
        A PNG file, the same bytes for the same input and matplotlib version.
    """
    width = min(40.0, max(6.0, 2.0 + 0.16 * len(residues)))
    with figure_in_style(width, 3.6 * len(panels), [title], [1], rows=len(panels)) as (figure, axes):
        step = max(1, -(-len(residues) // 200))
        for axis, (label, values) in zip(axes, panels.items(), strict=True):
            known = values[np.isfinite(values)]
            top = float(np.abs(known).max()) if len(known) and np.abs(known).max() > 0 else 1.0
            low, colours = (-top, "RdBu") if "Δ" in label else (0.0, "viridis")
            image = axis.imshow(
                values, cmap=colours, vmin=low, vmax=top, aspect="auto", interpolation="nearest"
            )
            axis.set_facecolor("#e8e8e8")
            axis.plot(range(len(residues)), wild_type, ".", color=INK, markersize=2.5)
            axis.set_yticks(range(len(letters)), letters, fontsize=6)
            axis.set_xticks(range(0, len(residues), step), residues[::step], rotation=90, fontsize=6)
            axis.set_title(label, fontsize=9)
            figure.colorbar(image, ax=axis, shrink=0.8)
        return to_png(figure)


class Margins(NamedTuple):
    """Space around the panels of a figure, in inches."""

    left: float  #: On the left
    right: float  #: On the right
    bottom: float  #: Below
    top: float  #: Above
    between: float  #: Between panels

    def grid(self, width: float, height: float, panels: int) -> dict[str, float]:
        """Return arguments of matplotlib's grid of ``panels`` in a row, for a figure of this size in inches."""
        panel = (width - self.left - self.right - self.between * (panels - 1)) / panels
        return {
            "left": self.left / width,
            "right": 1 - self.right / width,
            "bottom": self.bottom / height,
            "top": 1 - self.top / height,
            "wspace": self.between / panel,
        }


@contextmanager
def figure_in_style(
    width: float,
    height: float,
    title: Sequence[str],
    panels: Sequence[int],
    *,
    rows: int = 1,
    margins: Margins | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure in the style of all plots, and its axes by column or row.

    Sizes are in inches. ``title`` are lines above the panels, and ``panels`` the relative widths of those of a row.
    Without margins, which are for one row, the space around the panels is fitted to labels.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look: Any = {
        "font.family": FONTS[0],
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.linewidth": 0.7,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
        # Names come from sequence files: a dollar sign must not start a formula.
        "text.parse_math": False,
    }
    with matplotlib.rc_context(look):
        grid = None if margins is None else margins.grid(width, height, len(panels))
        figure = Figure(figsize=(width, height), dpi=150)
        if margins is None:
            figure.set_layout_engine("constrained")
        FigureCanvasAgg(figure)
        figure.suptitle("\n".join(title), fontsize=10)
        axes = figure.subplots(rows, len(panels), squeeze=False, width_ratios=panels, gridspec_kw=grid)
        yield figure, axes.ravel()


def to_png(figure: Any) -> bytes:
    """Return a figure as PNG, the same bytes for the same figure and matplotlib version."""
    out = io.BytesIO()
    figure.canvas.print_png(out, metadata={"Software": None})  # savefig draws twice
    return out.getvalue()


def _draw_plddt(axis: Any, plddt: np.ndarray, lengths: Sequence[int], numbers: np.ndarray | None) -> None:
    from matplotlib.patches import Patch

    for band in BANDS:
        axis.axhspan(band.low, band.high, color=band.colour, alpha=0.25, linewidth=0)
    residues = np.arange(1, len(plddt) + 1)
    axis.plot(residues, plddt, color=INK, linewidth=0.9, marker="." if len(plddt) < 3 else None)
    axis.set(ylabel="pLDDT", ylim=(0, 100), xlim=(0.5, len(plddt) + 0.5))
    mark_chains(axis, lengths, numbers, colour=INK)
    patches = [Patch(color=band.colour, alpha=0.6, linewidth=0) for band in BANDS]
    names = [f"{band.name} ({band.low} to {band.high})" for band in BANDS]
    _legend(axis, patches, names, None)


def _draw_pae(
    figure: Any,
    axis: Any,
    pae: np.ndarray,
    max_pae: float | None,
    lengths: Sequence[int],
    numbers: np.ndarray | None,
) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    n = len(pae)
    step = -(-n // _MAX_PIXELS)  # with more residues than pixels, every step-th one
    extent = (0.5, n + 0.5, n + 0.5, 0.5)
    colours = LinearSegmentedColormap.from_list("pae", PAE_COLOURS)
    image = axis.imshow(pae[::step, ::step], cmap=colours, vmin=0, vmax=max_pae, extent=extent)
    axis.set_ylabel("aligned residue")
    mark_chains(axis, lengths, numbers, colour="#d6604d", both=True)
    axis.set_xlabel("scored residue")
    figure.colorbar(image, ax=axis, label="aligned error (Å)", shrink=0.8, fraction=0.1)


def _legend(axis: Any, handles: Sequence[Any], names: Sequence[str], title: str | None) -> None:
    axis.legend(
        handles, names, title=title, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=5, fontsize=8,
        title_fontsize=8, handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip


def mark_chains(
    axis: Any, lengths: Sequence[int], numbers: np.ndarray | None, *, colour: str, both: bool = False
) -> None:
    """Draw lines between chains, their names and residue numbers; on the y axis too if ``both``."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ticks, labels = _chain_ticks(lengths, numbers)
    axis.set_xticks(ticks, labels)
    if both:
        axis.set_yticks(ticks, labels)
    axis.set_xlabel("residue")
    if len(lengths) == 1:
        return
    for border in starts[1:-1]:
        axis.axvline(border + 0.5, color=colour, linewidth=0.8)
        if both:
            axis.axhline(border + 0.5, color=colour, linewidth=0.8)
    if len(lengths) > _MAX_CHAIN_NAMES:
        return
    for number, (start, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
        axis.text(
            start + length / 2 + 0.5,
            1.01,
            chain_name(number),
            transform=axis.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontweight="bold",
            color=CHAIN_COLOURS[number % len(CHAIN_COLOURS)],
        )


def _chain_ticks(lengths: Sequence[int], numbers: np.ndarray | None = None) -> tuple[list[int], list[str]]:
    """Return positions on the axis of all residues, from 1, with the residue numbers shown there."""
    total = sum(lengths)
    step = next(
        s * 10**power for power in range(9) for s in (1, 2, 5) if total <= 10 * s * 10**power or power == 8
    )
    if numbers is None:
        numbers = np.concatenate([np.arange(1, length + 1) for length in lengths])
    borders = np.cumsum([0, *lengths])
    ticks: list[tuple[int, int]] = []
    heads: set[int] = set()
    for chain in map(slice, borders[:-1], borders[1:]):
        # The first residue of a chain, and of each part of it, comes before the last of the one before it.
        for k, (first, last) in enumerate(residue_ranges(numbers[chain])):
            place = int(chain.start) + int(np.searchsorted(numbers[chain], first)) + 1
            if ticks and place - ticks[-1][0] < 0.4 * step and ticks[-1][0] not in heads:
                ticks.pop()
            if not ticks or place - ticks[-1][0] >= 0.4 * step:
                ticks.append((place, first))
                heads.add(place)
            round_numbers = range(-(-first // step) * step, last + 1, step)
            more = [(place + number - first, number) for number in round_numbers if number > first]
            ticks += [one for one in more if (k == 0 and first == 1) or one[0] - place >= 0.4 * step]
    return [place for place, _ in ticks], [str(number) for _, number in ticks]
