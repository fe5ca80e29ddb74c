"""Layer normalisation over the last axis, with statistics in float32 or better, and a linear layer after it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments
from fastfold.kernels.common.layout import MAX_ROW_LENGTH
from fastfold.kernels.common.operator import BackwardPass, define_operator
from fastfold.kernels.common.scratch import (
    Scratch,
    accumulation_dtype,
    block_positions,
    gradient_positions,
    normalize,
    normalize_backward,
    normalize_to,
    position_blocks,
    without_autocast,
)
from fastfold.kernels.common.shapes import Shape, axes_of, check_shapes
from fastfold.kernels.cpu.block_threads import for_positions, sum_blocks
from fastfold.kernels.cpu.linear import (
    PreparedLinear,
    centered,
    gradient_dtype,
    product_dtype,
    requested_products,
)

EPS = 1e-5


def layer_norm_definition(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = EPS) -> Tensor:
    """Compute :func:`layer_norm` by its specification, step by step."""
    exact = torch.promote_types(x.dtype, torch.float32)
    deviation = x.to(exact) - x.to(exact).mean(-1, keepdim=True)
    out = deviation * (deviation.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        out = out * weight.to(exact)
    if bias is not None:
        out = out + bias.to(exact)
    return out.to(x.dtype)


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    if backend == "triton":
        from fastfold.kernels.ops.layer_norm.triton_fwd import layer_norm_forward

        return layer_norm_forward(x, weight, bias, eps)
    exact = accumulation_dtype(x)
    weight = None if weight is None else weight.to(exact)
    bias = None if bias is None else bias.to(exact)
    if weight is not None and bias is not None and x.numel() <= block_positions(x.shape[-1]) * x.shape[-1]:
        return normalize_to(x.dtype, x, (weight, bias), eps)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)

    def block(scratch: Scratch, _: slice, b_x: Tensor, b_out: Tensor) -> None:
        if weight is None or bias is None:
            b_out.copy_(normalize(b_x.to(exact), weight, bias, eps)[0])
        else:
            b_out.copy_(normalize_to(x.dtype, b_x, (weight, bias), eps))

    for_positions(block, x.shape[-1], Scratch().of(x), x, out)
    return out


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _compute_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, needs: Sequence[bool], backend: str
) -> list[Tensor]:
    """Return gradients of x, weight and bias, of the parameters in an exact dtype; empty tensors if not needed."""
    need_x, need_weight, need_bias = needs
    if backend == "triton":
        from fastfold.kernels.ops.layer_norm.triton_bwd import layer_norm_backward

        grads = layer_norm_backward(
            grad, x, weight, eps, need_x=need_x, need_weight=need_weight, need_bias=need_bias
        )
        return [x.new_empty(0) if g is None else g for g in grads]
    exact = accumulation_dtype(x)
    weight = None if weight is None else weight.to(exact)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    totals = [x.new_zeros(x.shape[-1], dtype=exact) if need else None for need in (need_weight, need_bias)]
    wanted = [x, grad] if grad_x is None else [x, grad, grad_x]

    def block(
        scratch: Scratch, totals: Sequence[Tensor | None], b_x: Tensor, b_grad: Tensor, *b_grad_x: Tensor
    ) -> None:
        b_x = b_x.to(exact)
        _, *b_statistics = normalize(b_x, None, None, eps)
        # PyTorch only checks if the shift is None, so any tensor serves.
        b_result = normalize_backward(b_grad.to(exact), b_x, b_statistics, weight, totals[1], *totals)
        for b_out in b_grad_x:
            b_out.copy_(b_result)

    size = gradient_positions(x.shape[-1], x.shape[:-1].numel(), gradient_dtype(x))
    sum_blocks(block, position_blocks(size, *wanted), Scratch().of(x), totals)
    return [x.new_empty(0) if g is None else g for g in (grad_x, *totals)]


def _backward_fake(call: Arguments) -> list[Tensor]:
    x, (need_x, *need_each) = call["x"], call["needs"]
    exact = accumulation_dtype(x)
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x.new_empty(0),
        *(x.new_empty(x.shape[-1], dtype=exact) if need else x.new_empty(0) for need in need_each),
    ]


@functools.lru_cache(maxsize=1024)
def _check(dtype: torch.dtype, x: Shape, weight: Shape | None, bias: Shape | None) -> None:
    channels = axes_of("layer_norm", "x", x, "c", dtype)[-1:]
    check_shapes("layer_norm", "x", x, (("weight", weight, channels), ("bias", bias, channels)))


_layer_norm = define_operator(
    "layer_norm",
    _forward,
    BackwardPass(_compute_gradients, ("x", "weight", "bias"), fake=_backward_fake),
    fake=_fake,
)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = EPS, *, backend: str | None = None
) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift.

    Args:
        x: ``[*, c]``, any floating dtype and any strides.
        weight: ``[c]`` scale, or None.
        bias: ``[c]`` shift, or None.
        eps: Added to the variance.
        backend: As in :func:`fastfold.kernels.common.backend.choose_backend`; rows of more than 4,096 channels always
            use PyTorch.

    Returns:
        ``[*, c]``, contiguous, in the dtype of ``x``; mean and variance are accumulated in float32 (float64 for
        float64).

    Raises:
        InputError: A shape does not match that of ``x``.
        ConfigError: The backend does not exist or cannot run here.

    Example:
        >>> import torch
        >>> from fastfold.kernels import layer_norm
        >>> x, weight, bias = torch.randn(3, 16), torch.randn(16), torch.randn(16)
        >>> plain = torch.nn.functional.layer_norm(x, [16], weight, bias)
        >>> torch.allclose(layer_norm(x, weight, bias), plain, atol=1e-5)
        True
    """
    check = _check if type(x) is Tensor and not is_dynamo_compiling() else _check.__wrapped__
    check(x.dtype, x.shape, None if weight is None else weight.shape, None if bias is None else bias.shape)
    chosen = choose_backend(x, backend, fits=x.shape[-1] <= MAX_ROW_LENGTH)
    return _layer_norm(x, weight, bias, eps, chosen)


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
    return _reduced_linear(x, norm_weight, norm_bias, weight, bias)


def keeps_bfloat16(x: Tensor) -> bool:
    """Return True if operators without gradients compute on ``x [*]`` in bfloat16 on a CPU.

    Example:
        >>> import torch
        >>> from fastfold.kernels import keeps_bfloat16
        >>> keeps_bfloat16(torch.zeros(3))
        False
    """
    dtype = x.dtype if requested_products() is None else product_dtype(x)
    return x.device.type == "cpu" and dtype == torch.bfloat16


@without_autocast
def _reduced_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)  # under autocast, parameters are in float32
    norm, moved = centered(x, (norm_weight.float(), norm_bias.float()), EPS, weight, bias)
    product = PreparedLinear(weight, moved, positions=x.shape[:-1].numel())
    out = x.new_empty(*x.shape[:-1], len(weight), dtype=product_dtype(x))

    def block(scratch: Scratch, _: slice, b_x: Tensor, b_out: Tensor) -> None:
        b_out.copy_(product(normalize_to(scratch.dtype, b_x, norm, EPS), "product", scratch))

    for_positions(block, x.shape[-1], Scratch().of(out), x, out)
    return out
