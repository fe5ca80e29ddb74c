"""Pictures of an ensemble: matrices of all pairs, landscape over two components, fluctuations and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastfold.inference.output.plots import CHAIN_COLORS, FAINT, INK, figure_in_style, mark_chains, to_png
from fastfold.products.ensemble.analysis import Analysis, EnsembleState
from fastfold.products.ensemble.members import Ensemble

_GRID = 120
_MOST_KT = 6.0  #: Upper end of the landscape's scale, in units of kT


def pairs_png(analysis: Analysis, *, title: str) -> bytes:
    """Draw TM-score and RMSD of all pairs as PNG, ordered by cluster."""
    order = np.argsort(analysis.clusters, kind="stable")
    borders = np.flatnonzero(np.diff(analysis.clusters[order])) + 1
    texts = [title, "pairs of samples, ordered by cluster"]
    with figure_in_style(12.6, 5.2, texts, [1, 1]) as (figure, axes):
        panels = ((analysis.tm_score, "TM-score", 1.0), (analysis.rmsd, "RMSD (Å)", None))
        for axis, (values, label, limit) in zip(axes, panels, strict=True):
            shown = values[np.ix_(order, order)]
            image = axis.imshow(shown, cmap="viridis", vmin=0.0, vmax=limit, interpolation="nearest")
            for border in borders:
                axis.axvline(border - 0.5, color="white", linewidth=0.8)
                axis.axhline(border - 0.5, color="white", linewidth=0.8)
            axis.set(xlabel="sample", ylabel="sample")
            figure.colorbar(image, ax=axis, label=label, shrink=0.8)
        return to_png(figure)


def landscape_png(analysis: Analysis, *, title: str) -> bytes:
    """Draw ``-ln(density)`` of the samples over the first two principal components as PNG, with clusters."""
    points = analysis.components[:, :2]
    if points.shape[1] < 2:
        points = np.column_stack([points, np.zeros(len(points))])
    shares = [*analysis.variance[:2], 0.0, 0.0]
    texts = [title, "frequency of the samples, not a free energy"]
    with figure_in_style(7.4, 5.6, texts, [1]) as (figure, (axis,)):
        if (density := landscape(points)) is not None:
            x, y, energy = density
            drawn = axis.contourf(x, y, energy, levels=np.linspace(0, _MOST_KT, 13), cmap="Blues_r")
            figure.colorbar(drawn, ax=axis, label="-ln(density / largest density)")
        for number in range(1, int(analysis.clusters.max()) + 1):
            chosen = analysis.clusters == number
            axis.scatter(
                points[chosen, 0], points[chosen, 1], s=14, linewidths=0.4, edgecolors="white",
                color=CHAIN_COLORS[(number - 1) % len(CHAIN_COLORS)],
            )  # fmt: skip
        for number, member in enumerate(analysis.representatives, 1):
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            axis.annotate(
                str(number), points[member], xytext=(5, 5), textcoords="offset points", fontsize=8, bbox=box
            )
        axis.set(
            xlabel=f"component 1 (Å, {shares[0]:.0%} of the variance)",
            ylabel=f"component 2 (Å, {shares[1]:.0%} of the variance)",
        )
        return to_png(figure)


def landscape(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Estimate ``-ln(density)`` of points ``[M, 2]`` in a plane by Gaussian kernels.

    Coordinates of a grid are ``x [G]`` and ``y [G]``, and values ``[G, G]``: 0 at the densest place, at most 6. None
    for fewer than four points, or points on one line.
    """
    from scipy.stats import gaussian_kde

    spread = np.ptp(points, axis=0)
    tolerance = 1e-6 * max(spread.max(), 1e-9)
    if len(points) < 4 or np.linalg.matrix_rank(points - points.mean(0), tol=tolerance) < 2:
        return None
    x, y = (
        np.linspace(low - 0.2 * width, high + 0.2 * width, _GRID)
        for low, high, width in zip(points.min(0), points.max(0), spread, strict=True)
    )
    grid = np.stack(np.meshgrid(x, y)).reshape(2, -1)
    density = gaussian_kde(points.T)(grid).reshape(_GRID, _GRID)
    with np.errstate(divide="ignore"):
        return x, y, np.minimum(-np.log(density / density.max()), _MOST_KT)


def fluctuation_png(ensemble: Ensemble, analysis: Analysis, *, title: str) -> bytes:
    """Draw the fluctuation of each residue as PNG, with the names of chains and residues in the files."""
    values = np.full(sum(ensemble.lengths), np.nan)
    values[ensemble.present] = analysis.fluctuation
    with figure_in_style(7.4, 4.2, [title], [1]) as (figure, (axis,)):
        axis.plot(np.arange(1, len(values) + 1), values, color=INK, linewidth=0.9)
        axis.set(ylabel="fluctuation of CA (Å)", xlim=(0.5, len(values) + 0.5))
        axis.set_ylim(bottom=0)
        mark_chains(axis, ensemble.lengths, ensemble.numbers, ensemble.names, color=FAINT)
        return to_png(figure)


def states_png(
    analysis: Analysis, states: Sequence[EnsembleState], plddt: np.ndarray, *, title: str
) -> bytes:
    """Draw the agreement of the samples with the first one or two states as PNG.

    ``plddt [M]`` is the mean pLDDT of the samples.
    """
    with figure_in_style(6.6, 5.6, [title], [1]) as (figure, (axis,)):
        y: Any = plddt if len(states) == 1 else states[1].tm_score
        colors = [CHAIN_COLORS[(number - 1) % len(CHAIN_COLORS)] for number in analysis.clusters]
        axis.scatter(states[0].tm_score, y, s=16, c=colors, linewidths=0.4, edgecolors="white")
        label = "mean pLDDT" if len(states) == 1 else f"TM-score to {states[1].name[:40]}"
        axis.set(xlabel=f"TM-score to {states[0].name[:40]}", ylabel=label, xlim=(0, 1.02))
        axis.set_ylim(0, 102 if len(states) == 1 else 1.02)
        return to_png(figure)
