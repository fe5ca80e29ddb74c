"""Cost of gated attention, and the part of it that a beginning takes."""

from __future__ import annotations

import math
from dataclasses import replace

from fastfold.kernels.common.cost import Arguments, OperatorCost, size_in_bytes
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams

BEGIN_LAUNCHES = 2  #: Kernels of a beginning: norm and product


def gated_attention_flops(
    rows: int, length: int, channels: int, width: int | None = None, *, gated: bool = True
) -> tuple[float, float, float]:
    """Return operations of :func:`fastfold.kernels.gated_attention`: projections, attention and output.

    Rows are those of all batch elements, the width the channels of all heads, by default those of ``x``.
    """
    width = channels if width is None else width
    one = 2.0 * rows * length * channels * width
    return (3 + gated) * one, 4.0 * rows * length**2 * width, one


def flops_of(call: Arguments) -> tuple[float, float, float]:
    """Return the operations of a call of any operator of gated attention, with or without gate."""
    *rows, length, channels = call["x"].shape
    p = GatedAttentionParams.of(call["parameters"])
    width, gated = len(p.query_weight), p.gate_weight is not None
    return gated_attention_flops(math.prod(rows), length, channels, width, gated=gated)


def scores_of(call: Arguments) -> float:
    """Return the number of scores of a call; each has an exponential."""
    *rows, length, _ = call["x"].shape
    return float(math.prod(rows) * length**2 * call["heads"])


def forward_cost(call: Arguments) -> OperatorCost:
    """Return the cost of a forward pass."""
    # Queries, keys, values, gate and attended values of a block of rows go through memory.
    return OperatorCost(
        sum(flops_of(call)), 10 * size_in_bytes(call["x"]), launches=6, exponentials=scores_of(call)
    )


def without_beginning(call: Arguments, whole: OperatorCost) -> OperatorCost:
    """Subtract the projections of the first block from a call's cost, if ``begun`` has them."""
    if not call["begun"]:
        return whole
    done = 2.0 * call["begun"][-1].numel() * call["x"].shape[-1]
    return replace(whole, flops=whole.flops - done, launches=whole.launches - BEGIN_LAUNCHES)
