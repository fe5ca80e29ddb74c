"""What FastFold's own operators cost: floating-point operations, memory traffic, workspace and kernel launches.

PyTorch counts its own operators (``torch.utils.flop_counter``); a fused one is opaque to it. Two operations are
counted per multiply-add of every matrix product, as there. The backward operators keep nothing but their inputs, so
they compute the forward pass again, all but its last projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Arguments = Mapping[str, Any]
"""Arguments of a call by the names of the operator's schema."""


@dataclass(frozen=True)
class OperatorCost:
    """Cost of one call beyond reading its inputs and writing its results.

    Attributes:
        flops: Floating-point operations of its matrix products.
        traffic: Bytes of intermediate results that are written and read.
        workspace: Bytes that it holds in addition to inputs and results.
        launches: Kernels that it starts.
    """

    flops: float
    traffic: float = 0.0
    workspace: float = 0.0
    launches: int = 1


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _triangle_parts(call: Arguments) -> tuple[float, float]:
    """Of everything up to the product, and of what follows it."""
    z, projection = call["z"], call["parameters"][2]
    channels, width = z.shape[-1], projection.shape[0] // 2
    positions = z.numel() // channels
    before = 8 * positions * channels * width + 2 * positions * z.shape[-2] * width
    return before, 2 * positions * channels * (width + channels)


def _triangle_multiplication(call: Arguments) -> OperatorCost:
    # The docstring of the operator: two pair tensors in addition to its inputs and result.
    workspace = 2.0 * _bytes(call["z"])
    return OperatorCost(sum(_triangle_parts(call)), 2 * workspace, workspace, 3)


def _triangle_multiplication_backward(call: Arguments) -> OperatorCost:
    before, after = _triangle_parts(call)
    workspace = 3.125 * _bytes(call["z"])
    return OperatorCost(3 * before + 2 * after, 2 * workspace, workspace, 8)


def _projection_flops(x: Tensor, *weights: Tensor) -> float:
    """Of products of all positions of ``x [*, c]`` with matrices."""
    return 2.0 * x.numel() // x.shape[-1] * sum(w.numel() for w in weights)


def _triangle_factors(call: Arguments) -> OperatorCost:
    return OperatorCost(_projection_flops(call["z"], call["parameters"][2], call["parameters"][4]))


def _triangle_factors_backward(call: Arguments) -> OperatorCost:
    return OperatorCost(3 * _triangle_factors(call).flops, launches=2)


def _triangle_update(call: Arguments) -> OperatorCost:
    return OperatorCost(_projection_flops(call["z"], call["parameters"][4], call["parameters"][6]))


def _triangle_update_backward(call: Arguments) -> OperatorCost:
    z = call["z"]  # a copy of the product's gradient, and the gradient of the normalised z
    return OperatorCost(3 * _triangle_update(call).flops, 2 * _bytes(z), _bytes(z), 4)


def _gated_parts(call: Arguments) -> tuple[float, float, float]:
    """Of the projections of the input, of the attention, and of the projection of the output."""
    x, width = call["x"], call["query_weight"].shape[0]
    positions = x.numel() // x.shape[-1]
    one = 2.0 * positions * x.shape[-1] * width
    return (3 + (call["gate_weight"] is not None)) * one, 4.0 * positions * x.shape[-2] * width, one


def _gated_attention(call: Arguments) -> OperatorCost:
    # Queries, keys, values, gate and attended values of a block of rows go through memory.
    return OperatorCost(sum(_gated_parts(call)), 10 * _bytes(call["x"]), launches=6)


def _gated_attention_backward(call: Arguments) -> OperatorCost:
    projections, attention, output = _gated_parts(call)
    flops = 3 * projections + 3.5 * attention + 2 * output
    return OperatorCost(flops, 25 * _bytes(call["x"]), launches=14)


def _attention_flops(call: Arguments) -> float:
    # q [*, R, Nq, H, D], k [*, R, Nk, H, D]
    return 4.0 * call["q"].numel() * call["k"].shape[-3]


def _attention(call: Arguments) -> OperatorCost:
    return OperatorCost(_attention_flops(call))


def _attention_backward(call: Arguments) -> OperatorCost:
    # Five products where the forward pass has two: the scores are computed again.
    return OperatorCost(2.5 * _attention_flops(call), launches=3)


def _transition_part(call: Arguments) -> float:
    """One of the two layers."""
    x, hidden = call["x"], call["parameters"][2].shape[0]
    return 2.0 * x.numel() * hidden


def _transition(call: Arguments) -> OperatorCost:
    return OperatorCost(2 * _transition_part(call))


def _transition_backward(call: Arguments) -> OperatorCost:
    return OperatorCost(5 * _transition_part(call), launches=3)


def _outer_parts(call: Arguments) -> tuple[float, float]:
    """Of the outer products, and of the projection."""
    left, right = call["left"], call["right"]
    sequences, _, width = left.shape[-3:]
    pairs = left.numel() // (sequences * width) * right.shape[-2]
    return 2.0 * sequences * pairs * width * right.shape[-1], 2.0 * pairs * call["weight"].numel()


def _outer_product_mean(call: Arguments) -> OperatorCost:
    return OperatorCost(sum(_outer_parts(call)), launches=2)


def _outer_product_mean_backward(call: Arguments) -> OperatorCost:
    outer, projection = _outer_parts(call)
    return OperatorCost(3 * outer + 2 * projection, launches=6)


def _pair_bias(call: Arguments) -> OperatorCost:
    return OperatorCost(2.0 * call["z"].numel() * call["weight"].shape[0])


def _pair_bias_backward(call: Arguments) -> OperatorCost:
    return OperatorCost(4.0 * call["z"].numel() * call["weight"].shape[0], launches=2)


def _no_product(call: Arguments) -> OperatorCost:
    return OperatorCost(0.0)


OPERATOR_COSTS: dict[str, Callable[[Arguments], OperatorCost]] = {
    "triangle_multiplication": _triangle_multiplication,
    "triangle_multiplication_backward": _triangle_multiplication_backward,
    "triangle_factors": _triangle_factors,
    "triangle_factors_backward": _triangle_factors_backward,
    "triangle_update": _triangle_update,
    "triangle_update_backward": _triangle_update_backward,
    "gated_attention": _gated_attention,
    "gated_attention_backward": _gated_attention_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "transition": _transition,
    "transition_backward": _transition_backward,
    "outer_product_mean": _outer_product_mean,
    "outer_product_mean_backward": _outer_product_mean_backward,
    "pair_bias": _pair_bias,
    "pair_bias_backward": _pair_bias_backward,
    "layer_norm": _no_product,
    "layer_norm_backward": _no_product,
    "residual_update": _no_product,
    "residual_update_backward": _no_product,
    "softmax": _no_product,
    "softmax_backward": _no_product,
}
"""By the operator's name in the namespace ``fastfold``."""
