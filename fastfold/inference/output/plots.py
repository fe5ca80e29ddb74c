"""A plot of what the network thinks of its prediction: pLDDT along the chains, PAE between all residues.

matplotlib is imported on first use, and without pyplot: no window, no state that outlives the call.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

_BANDS = ((0, 50, "#ff7d45"), (50, 70, "#ffdb13"), (70, 90, "#65cbf3"), (90, 100, "#0053d6"))
"""pLDDT bands with the colours by which AlphaFold DB made them known."""
_MAX_PIXELS = 1_024


def confidence_png(
    plddt: np.ndarray,
    chain_index: np.ndarray,
    *,
    pae: np.ndarray | None = None,
    max_pae: float | None = None,
    title: str = "",
) -> bytes:
    """Draws pLDDT per residue and, where there is one, the PAE matrix.

    Args:
        plddt: ``[N]``, 0 to 100.
        chain_index: ``[N]``; lines mark where it changes.
        pae: ``[N, N]`` in Å.
        max_pae: Upper end of the PAE scale, in Å.
        title: Text above the plot.

    Returns:
        A PNG file, the same bytes for the same input and matplotlib version.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 if pae is None else 11.6, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    # Names come from sequence files: a dollar sign in one is not a formula.
    figure.suptitle(title, fontsize=10, parse_math=False)
    panels = [5] if pae is None else [3, 2]
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=panels)[0]
    borders = np.flatnonzero(np.diff(chain_index)) + 1
    _draw_plddt(axes[0], plddt, borders)
    if pae is not None:
        _draw_pae(figure, axes[1], pae, max_pae, borders)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _draw_plddt(axis: Any, plddt: np.ndarray, borders: np.ndarray) -> None:
    for low, high, colour in _BANDS:
        axis.axhspan(low, high, color=colour, alpha=0.25, linewidth=0)
    residues = np.arange(1, len(plddt) + 1)
    axis.plot(residues, plddt, color="black", linewidth=0.9, marker="." if len(plddt) < 3 else None)
    for border in borders:
        axis.axvline(border + 0.5, color="black", linewidth=0.6, linestyle="--")
    axis.set(xlabel="residue", ylabel="pLDDT", ylim=(0, 100), xlim=(0.5, len(plddt) + 0.5))
    axis.set_title(f"mean pLDDT {float(np.mean(plddt, dtype=np.float64)):.1f}", fontsize=9)


def _draw_pae(figure: Any, axis: Any, pae: np.ndarray, max_pae: float | None, borders: np.ndarray) -> None:
    n = len(pae)
    step = -(-n // _MAX_PIXELS)  # more residues than pixels: every step-th one
    extent = (0.5, n + 0.5, n + 0.5, 0.5)
    image = axis.imshow(pae[::step, ::step], cmap="Greens_r", vmin=0, vmax=max_pae, extent=extent)
    for border in borders:
        axis.axvline(border + 0.5, color="tab:red", linewidth=0.8)
        axis.axhline(border + 0.5, color="tab:red", linewidth=0.8)
    axis.set(xlabel="scored residue", ylabel="aligned residue")
    axis.set_title("predicted aligned error", fontsize=9)
    figure.colorbar(image, ax=axis, label="Å", shrink=0.8)
