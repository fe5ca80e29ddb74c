"""Linear layer after a normalisation, in one pass over the data if a CPU multiplies them in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.scratch import Scratch, normalize_to, without_autocast
from fastfold.kernels.cpu.block_threads import for_positions
from fastfold.kernels.cpu.linear import (
    PreparedLinear,
    centered,
    product_dtype,
    requested_products,
)
from fastfold.kernels.ops.layer_norm.op import layer_norm

EPS = 1e-5


def normalized_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Compute ``LN(x) Wᵀ + b``; without gradients on a CPU in the precision of the operators' products.

    Args:
        x: ``[*, K]``, any strides.
        norm_weight: ``[K]``, scale of the normalisation.
        norm_bias: ``[K]``, its shift.
        weight: W ``[N, K]``.
        bias: b ``[N]``.

    Returns:
        ``[*, N]`` in the dtype of ``x``; in bfloat16 if products of float32 data are.

    Example:
        >>> import torch
        >>> from fastfold.kernels import normalized_linear
        >>> normalized_linear(torch.randn(5, 8), torch.ones(8), torch.zeros(8), torch.randn(3, 8), torch.zeros(3)).shape
        torch.Size([5, 3])
    """
    if torch.is_grad_enabled() or not keeps_bfloat16(x):
        return linear(layer_norm(x, norm_weight, norm_bias), weight, bias)
    return _forward(x, norm_weight, norm_bias, weight, bias)


def keeps_bfloat16(x: Tensor) -> bool:
    """Return True if operators without gradients compute on ``x`` in bfloat16 on a CPU.

    Example:
        >>> import torch
        >>> from fastfold.kernels import keeps_bfloat16
        >>> keeps_bfloat16(torch.zeros(3))
        False
    """
    dtype = x.dtype if requested_products() is None else product_dtype(x)
    return x.device.type == "cpu" and dtype == torch.bfloat16


@without_autocast
def _forward(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)  # under autocast, parameters are in float32
    norm, moved = centered(x, (norm_weight.float(), norm_bias.float()), EPS, weight, bias)
    product = PreparedLinear(weight, moved, positions=x.shape[:-1].numel())
    out = x.new_empty(*x.shape[:-1], len(weight), dtype=product_dtype(x))

    def block(scratch: Scratch, _: slice, b_x: Tensor, b_out: Tensor) -> None:
        b_out.copy_(product(normalize_to(scratch.dtype, b_x, norm, EPS), "product", scratch))

    for_positions(block, x.shape[-1], Scratch().of(out), x, out)
    return out
