"""Plots of a prediction, and the colours and fonts of plots and of the report page.

matplotlib is imported on first use and without pyplot, so there are no windows and no global state.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from fastfold.protein.labels import AuthorNames, numbers_of_ranges, residue_ranges
from fastfold.protein.protein import chain_name


class Band(NamedTuple):
    """Range of pLDDT."""

    low: int  #: Lower end, inclusive
    high: int  #: Upper end
    color: str  #: ``#rrggbb``, AlphaFold DB's colours
    name: str  #: Name of the range


BANDS: Final = (
    Band(90, 100, "#0053d6", "very high"),
    Band(70, 90, "#65cbf3", "high"),
    Band(50, 70, "#ffdb13", "low"),
    Band(0, 50, "#ff7d45", "very low"),
)

CHAIN_COLORS: Final = (
    "#1b7837", "#762a83", "#2166ac", "#b2182b", "#8c510a", "#01665e",
    "#c51b7d", "#4d4d4d", "#e08214", "#35978f", "#542788", "#7fbc41",
)  # fmt: skip
"""Colours of chains in order, repeated for more chains."""

IDENTITY_COLORS: Final = ("#d9d9d9", "#c7c1de", "#a79fcf", "#7c6bb5", "#4a2f8f")
"""Colours of alignment rows by their identity to the query, from the lowest."""

PAE_COLORS: Final = ("#00441b", "#1b7837", "#5aae61", "#a6dba0", "#d9f0d3", "#f7fcf5")
"""Colours from no aligned error to the largest."""

INK: Final = "#1f2933"
"""Colour of text and lines."""

FAINT: Final = "#8a949e"
"""Colour of grids, frames and secondary text."""

FONTS: Final = ("DejaVu Sans", "Verdana", "Arial", "sans-serif")


_MAX_PIXELS = 1_024
_MAX_CHAIN_NAMES = 26  #: Largest number of names above a plot


def confidence_png(
    plddt: np.ndarray,
    chain_index: np.ndarray,
    *,
    numbers: np.ndarray | None = None,
    names: AuthorNames | None = None,
    pae: np.ndarray | None = None,
    max_pae: float | None = None,
    title: str = "",
    ptm: float | None = None,
    iptm: float | None = None,
) -> bytes:
    """Draw pLDDT per residue and, if given, the aligned error, with chains marked and numbered, as reproducible PNG.

    Args:
        plddt: ``[N]``, 0 to 100.
        chain_index: ``[N]`` int: 0, ..., 0, 1, ..., 1, and so on.
        numbers: ``[N]`` int, residue numbers with the gaps of chains; None for 1, 2 and so on in each chain.
        names: Names of chains and residues; None for A, B, ... and the numbers.
        pae: ``[N, N]`` in Å.
        max_pae: Upper end of the PAE scale, in Å.
        title: Text above the plot, followed by the scores.
        ptm: 0 to 1.
        iptm: 0 to 1.
    """
    lengths = np.bincount(np.asarray(chain_index)).tolist()
    scores = [f"mean pLDDT {float(np.mean(plddt, dtype=np.float64)):.1f}"]
    scores += [f"{name} {value:.2f}" for name, value in (("pTM", ptm), ("ipTM", iptm)) if value is not None]
    width, panels = (7.4, [1]) if pae is None else (12.6, [3, 2])
    lines = [part for part in (title, " · ".join(scores)) if part]
    # Margins of their own, because searching for a layout takes a third of the time to draw, and a fold waits for it.
    top = 0.2 + 0.16 * len(lines) + (0.18 if len(lengths) > 1 else 0.0)
    left, right, between, height = 0.56, 0.2 if pae is None else 0.4, 0.95, 4.8
    panel = (width - left - right - between * (len(panels) - 1)) / len(panels)
    grid = {"left": left / width, "right": 1 - right / width, "wspace": between / panel}
    grid |= {"bottom": 0.7 / height, "top": 1 - top / height}
    with figure_in_style(width, height, lines, panels, grid=grid) as (figure, axes):
        _draw_plddt(axes[0], plddt, lengths, numbers, names)
        if pae is not None:
            _draw_pae(figure, axes[1], pae, max_pae, lengths, numbers, names)
        return to_png(figure)


def coverage_png(coverage: Mapping[str, Any], *, title: str = "") -> bytes:
    """Draw the number of alignment rows that cover each residue, by identity to the query, as reproducible PNG."""
    lengths, edges = coverage["chain_lengths"], coverage["identity_edges"]
    depth = np.asarray(coverage["depth_by_identity"])[::-1]  # the most similar rows at the bottom
    bands = [f"{low:.0%} to {high:.0%}" for low, high in itertools.pairwise(edges)][::-1]
    line = f"alignment rows: {', '.join(f'{rows:,}' for rows in coverage['rows'])}"
    with figure_in_style(7.4, 4.8, [part for part in (title, line) if part], [1]) as (figure, (axis,)):
        # Steps, so that all residues have the same width.
        borders = np.arange(depth.shape[1] + 1) + 0.5
        values = np.concatenate([depth, depth[:, -1:]], 1)
        axis.stackplot(borders, values, labels=bands, colors=IDENTITY_COLORS[::-1], step="post", linewidth=0)
        axis.set(ylabel="rows without a gap", xlim=(0.5, sum(lengths) + 0.5))
        axis.set_ylim(0, 1.05 * max(1, int(depth.sum(0).max())))
        numbers, names = None, None
        if ranges := coverage.get("residue_ranges"):
            numbers = np.concatenate([numbers_of_ranges(*one) for one in zip(ranges, lengths, strict=True)])
            if ids := coverage.get("chain_ids"):
                names = AuthorNames(tuple(ids), tuple(map(str, numbers)))
        mark_chains(axis, lengths, numbers, names, color=INK)
        handles, labels = axis.get_legend_handles_labels()
        _legend(axis, handles[::-1], labels[::-1], "identity to the query")
        return to_png(figure)


def trajectory_png(
    loss: Sequence[float], plddt: Sequence[float], stages: Sequence[str], *, title: str = ""
) -> bytes:
    """Draw loss and mean pLDDT (0 to 100) of a design's steps, with their stages, as reproducible PNG."""
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
    wild_type: Sequence[float],
    *,
    title: str = "",
) -> bytes:
    """Draw heat maps of single mutants as reproducible PNG: a row for each new letter, a column for each residue.

    Args:
        panels: ``[L, M]`` values by label; NaN for mutants that were not folded. Labels with Δ have colours around 0.
        residues: ``M`` names of the residues.
        letters: ``L`` new letters.
        wild_type: ``M`` rows of the wild type's letters, which are marked; NaN for unknown ones.
        title: Text above the plot.
    """
    width = min(40.0, max(6.0, 2.0 + 0.16 * len(residues)))
    with figure_in_style(width, 3.6 * len(panels), [title], [1], rows=len(panels)) as (figure, axes):
        step = max(1, -(-len(residues) // 200))
        for axis, (label, values) in zip(axes, panels.items(), strict=True):
            known = values[np.isfinite(values)]
            top = float(np.abs(known).max()) if len(known) and np.abs(known).max() > 0 else 1.0
            low, colors = (-top, "RdBu") if "Δ" in label else (0.0, "viridis")
            image = axis.imshow(
                values, cmap=colors, vmin=low, vmax=top, aspect="auto", interpolation="nearest"
            )
            axis.set_facecolor("#e8e8e8")
            axis.plot(range(len(residues)), wild_type, ".", color=INK, markersize=2.5)
            axis.set_yticks(range(len(letters)), letters, fontsize=6)
            axis.set_xticks(range(0, len(residues), step), residues[::step], rotation=90, fontsize=6)
            axis.set_title(label, fontsize=9)
            figure.colorbar(image, ax=axis, shrink=0.8)
        return to_png(figure)


@contextmanager
def figure_in_style(
    width: float,
    height: float,
    title: Sequence[str],
    panels: Sequence[int],
    *,
    rows: int = 1,
    grid: dict[str, Any] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure of a size in inches in the style of all plots, and its axes by column or row.

    ``title`` are lines above the panels of these relative widths. Without a ``grid``, arguments of matplotlib's
    for the space around the panels, it is fitted to labels.
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
        figure = Figure(figsize=(width, height), dpi=150)
        if grid is None:
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


def _draw_plddt(
    axis: Any,
    plddt: np.ndarray,
    lengths: Sequence[int],
    numbers: np.ndarray | None,
    names: AuthorNames | None,
) -> None:
    from matplotlib.patches import Patch

    for band in BANDS:
        axis.axhspan(band.low, band.high, color=band.color, alpha=0.25, linewidth=0)
    residues = np.arange(1, len(plddt) + 1)
    axis.plot(residues, plddt, color=INK, linewidth=0.9, marker="." if len(plddt) < 3 else None)
    axis.set(ylabel="pLDDT", ylim=(0, 100), xlim=(0.5, len(plddt) + 0.5))
    mark_chains(axis, lengths, numbers, names, color=INK)
    patches = [Patch(color=band.color, alpha=0.6, linewidth=0) for band in BANDS]
    labels = [f"{band.name} ({band.low} to {band.high})" for band in BANDS]
    _legend(axis, patches, labels, None)


def _draw_pae(
    figure: Any,
    axis: Any,
    pae: np.ndarray,
    max_pae: float | None,
    lengths: Sequence[int],
    numbers: np.ndarray | None,
    names: AuthorNames | None,
) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    n = len(pae)
    step = -(-n // _MAX_PIXELS)  # with more residues than pixels, every step-th one
    extent = (0.5, n + 0.5, n + 0.5, 0.5)
    colors = LinearSegmentedColormap.from_list("pae", PAE_COLORS)
    image = axis.imshow(pae[::step, ::step], cmap=colors, vmin=0, vmax=max_pae, extent=extent)
    axis.set_ylabel("aligned residue")
    mark_chains(axis, lengths, numbers, names, color="#d6604d", both=True)
    axis.set_xlabel("scored residue")
    figure.colorbar(image, ax=axis, label="aligned error (Å)", shrink=0.8, fraction=0.1)


def _legend(axis: Any, handles: Sequence[Any], names: Sequence[str], title: str | None) -> None:
    axis.legend(
        handles, names, title=title, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=5, fontsize=8,
        title_fontsize=8, handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip


def mark_chains(
    axis: Any,
    lengths: Sequence[int],
    numbers: np.ndarray | None,
    names: AuthorNames | None = None,
    *,
    color: str,
    both: bool = False,
) -> None:
    """Draw lines between chains, their names and residue numbers; on the y axis too if ``both``."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ticks, labels = _chain_ticks(lengths, numbers)
    if names is not None:
        labels = [names.numbers[place - 1] for place in ticks]
    axis.set_xticks(ticks, labels)
    if both:
        axis.set_yticks(ticks, labels)
    axis.set_xlabel("residue")
    if len(lengths) == 1:
        return
    for border in starts[1:-1]:
        axis.axvline(border + 0.5, color=color, linewidth=0.8)
        if both:
            axis.axhline(border + 0.5, color=color, linewidth=0.8)
    if len(lengths) > _MAX_CHAIN_NAMES:
        return
    for number, (start, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
        axis.text(
            start + length / 2 + 0.5,
            1.01,
            chain_name(number) if names is None else names.chain_ids[number],
            transform=axis.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontweight="bold",
            color=CHAIN_COLORS[number % len(CHAIN_COLORS)],
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
        for first, last in residue_ranges(numbers[chain]):
            place = int(chain.start) + int(np.searchsorted(numbers[chain], first)) + 1
            if ticks and place - ticks[-1][0] < 0.4 * step and ticks[-1][0] not in heads:
                ticks.pop()
            if not ticks or place - ticks[-1][0] >= 0.4 * step:
                ticks.append((place, first))
                heads.add(place)
            round_numbers = range(-(-first // step) * step, last + 1, step)
            more = [(place + number - first, number) for number in round_numbers]
            ticks += [one for one in more if one[0] - place >= 0.4 * step]
    return [place for place, _ in ticks], [str(number) for _, number in ticks]
