"""Plots of curves over the steps of a run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = [{name: curve} for name, curve in curves.items()] if panels else [curves]
    columns = 2 if len(groups) > 1 else 1
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(7.2, 4.2 if rows == 1 else 2.2 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
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
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _draw(axis: Any, curves: Mapping[str, Curve], logarithmic: bool) -> None:
    for name, (steps, values) in curves.items():
        (line,) = axis.plot(steps, smooth(values), linewidth=1.3, label=name)
        if len(steps) < _MANY:
            line.set_marker("o")
            line.set_markersize(3)
        elif len(curves) <= 2:
            axis.plot(steps, values, linewidth=0.5, alpha=0.3, color=line.get_color(), zorder=1)
    if logarithmic and all(np.all(values > 0) for _, values in curves.values()):
        axis.set_yscale("log")
    axis.grid(alpha=0.25)
    if len(curves) > 1:
        axis.legend(fontsize=8)
