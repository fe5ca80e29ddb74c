"""Plots of a run: curves over its steps, and the calibration of the network's confidence."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]  #: Steps ``[n]`` and values ``[n]``

_MANY = 60  # number of points from which a curve is drawn as a smooth line over thin points


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the mean ``[n]`` over a window of a fiftieth of finite ``values [n]``, truncated at both ends."""
    half = len(values) // 100
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def curves_png(
    curves: Mapping[str, Curve],
    *,
    ylabel: str,
    logarithmic: bool = False,
    panels: bool = False,
    marks: Sequence[int] = (),
) -> bytes:
    """Draw curves over the step as a PNG file, by their names in the legend; smooth those with many points.

    The same input and matplotlib version give the same bytes. A logarithmic axis needs values above 0. With ``panels``
    each curve has its own panel and vertical axis, with its name above. ``marks`` are steps of events, drawn as
    vertical lines.
    """
    groups = [{name: curve} for name, curve in curves.items()] if panels else [curves]
    columns = 2 if len(groups) > 1 else 1
    rows = -(-len(groups) // columns)
    figure = _figure(7.2, 4.2 if rows == 1 else 2.2 * rows, dpi=130)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    for axis, group in zip(axes, groups, strict=False):
        _draw(axis, group, logarithmic)
        for step in sorted(set(marks)):
            axis.axvline(step, color="0.6", linewidth=0.7, linestyle=":", zorder=0)
        if panels:
            axis.set_title(next(iter(group)), fontsize=9)
    for axis in axes[len(groups) :]:
        axis.remove()
    figure.supxlabel("step", fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    return _png(figure)


def _draw(axis: Any, curves: Mapping[str, Curve], logarithmic: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, (steps, values) in curves.items():
        (line,) = axis.plot(steps, smooth(values), linewidth=1.3, label=name)
        if len(steps) < _MANY:
            line.set_marker("o")
            line.set_markersize(3)
        elif len(curves) <= 2:
            axis.plot(steps, values, linewidth=0.5, alpha=0.3, color=line.get_color(), zorder=1)
    if logarithmic and all(np.all(values > 0) for _, values in curves.values()):
        _set_logarithmic(axis, np.concatenate([values for _, values in curves.values()]))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.grid(alpha=0.25)
    if len(curves) > 1:
        axis.legend(fontsize=8)


def _set_logarithmic(axis: Any, values: np.ndarray) -> None:
    """Make the vertical axis logarithmic, with plain numbers as ticks where it has less than two decades."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    axis.set_yscale("log")
    if len(values) and values.max() < 100 * values.min():
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axis.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
        axis.yaxis.set_minor_locator(NullLocator())


@dataclass(frozen=True)
class Calibration:
    """Comparison of predicted with true lDDT-CA, residue by residue, all from 0 to 1."""

    residues: int  #: Number of residues
    pearson: float  #: Correlation over residues; NaN if one of the two is constant
    bias: float  #: Mean predicted minus mean true lDDT: above 0 for an overconfident network
    #: Mean absolute calibration error: the distance between mean predicted and mean true lDDT of a bin, averaged over
    #: bins weighted by residues. 0 for a network whose predictions are right on average in each bin.
    error: float
    edges: np.ndarray  #: ``[bins + 1]``, edges of the bins of predicted lDDT
    counts: np.ndarray  #: ``[bins]``, residues of each bin
    predicted: np.ndarray  #: ``[bins]``, mean predicted lDDT; NaN in an empty bin
    true: np.ndarray  #: ``[bins]``, mean true lDDT; NaN in an empty bin


def calibrate(predicted: np.ndarray, true: np.ndarray, *, bins: int = 20) -> Calibration:
    """Compare predicted with true lDDT-CA of resolved residues, ``[N]`` in 0 to 1, in bins of equal width.

    Raises:
        ValueError: The arrays differ in length, or a value is not in 0 to 1.
    """
    predicted, true = (np.asarray(x, dtype=np.float64).ravel() for x in (predicted, true))
    if predicted.shape != true.shape:
        raise ValueError(
            f"expected equal lengths, found {predicted.size} predicted and {true.size} true values"
        )
    for values in (predicted, true):
        if not np.all((values >= 0) & (values <= 1 + 1e-6)):  # also false for NaN
            raise ValueError("expected lDDT in 0 to 1, found other values")
    edges = np.linspace(0.0, 1.0, bins + 1)
    index = np.clip(np.searchsorted(edges, predicted, side="right") - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_predicted, mean_true = (
            np.bincount(index, weights=x, minlength=bins) / counts for x in (predicted, true)
        )
    n = predicted.size
    varied = n > 1 and np.ptp(predicted) > 0 and np.ptp(true) > 0
    return Calibration(
        residues=n,
        pearson=float(np.corrcoef(predicted, true)[0, 1]) if varied else math.nan,
        bias=float(predicted.mean() - true.mean()) if n else math.nan,
        error=float(np.nansum(counts * np.abs(mean_predicted - mean_true)) / n) if n else math.nan,
        edges=edges,
        counts=counts,
        predicted=mean_predicted,
        true=mean_true,
    )


def calibration_png(calibration: Calibration, *, title: str = "") -> bytes:
    """Draw the mean true lDDT over the predicted one, with the diagonal of perfect calibration, as a PNG file.

    The same input and matplotlib version give the same bytes.
    """
    figure = _figure(5.2, 6.0, dpi=150)
    figure.suptitle(title, fontsize=10, parse_math=False)
    curve, histogram = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    curve.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--", label="honest")
    has_counts = calibration.counts > 0
    curve.plot(
        calibration.predicted[has_counts],
        calibration.true[has_counts],
        marker="o",
        markersize=4,
        label="network",
    )
    curve.set(ylabel="true lDDT-CA, mean of the bin", xlim=(0, 1), ylim=(0, 1))
    curve.set_title(
        f"{calibration.residues:,} residues, r = {calibration.pearson:.3f}, "
        f"calibration error {calibration.error:.3f}, bias {calibration.bias:+.3f}",
        fontsize=8,
    )
    curve.legend(fontsize=8, loc="upper left")
    centers = (calibration.edges[:-1] + calibration.edges[1:]) / 2
    histogram.bar(centers, calibration.counts, width=np.diff(calibration.edges) * 0.9, color="tab:blue")
    histogram.set(xlabel="predicted lDDT", ylabel="residues")
    return _png(figure)


def _figure(width: float, height: float, *, dpi: int) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def _png(figure: Any) -> bytes:
    """Return a figure as a PNG file without matplotlib's version."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out, metadata={"Software": None})  # savefig draws twice
    return out.getvalue()
