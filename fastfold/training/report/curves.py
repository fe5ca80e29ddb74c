"""Curves over the steps of a run, as plots."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]
"""Steps ``[n]`` and values ``[n]``."""

_MANY = 60  # points from which a curve is drawn smoothed, with its points behind it


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of a fiftieth of the curve, which is cut at both ends.

    Args:
        values: ``[n]``, all finite.

    Returns:
        ``[n]``.
    """
    half = len(values) // 100
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def curves_png(curves: Mapping[str, Curve], *, ylabel: str, logarithmic: bool = False) -> bytes:
    """Draw curves over the step, smoothed where they have many points.

    Args:
        curves: What to draw, by its name in the legend.
        ylabel: Text of the vertical axis.
        logarithmic: Logarithmic vertical axis, if all values are above 0.

    Returns:
        A PNG file, the same bytes for the same input and matplotlib version.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, (steps, values) in curves.items():
        (line,) = axis.plot(steps, smooth(values), linewidth=1.3, label=name)
        if len(steps) < _MANY:
            line.set_marker("o")
            line.set_markersize(3)
        elif len(curves) <= 2:
            axis.plot(steps, values, linewidth=0.5, alpha=0.3, color=line.get_color(), zorder=1)
    if logarithmic and all(np.all(values > 0) for _, values in curves.values()):
        axis.set_yscale("log")
    axis.set(xlabel="step", ylabel=ylabel)
    axis.grid(alpha=0.25)
    if len(curves) > 1:
        axis.legend(fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
