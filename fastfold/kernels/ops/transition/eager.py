"""Transition in PyTorch: the intermediate exists for one block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.kernels.common.parameters import with_exact_norms
from fastfold.kernels.common.scratch import (
    Scratch,
    accumulation_dtype,
    finish,
    gradient_positions,
    normalize,
    normalize_backward,
    normalize_to,
    position_blocks,
)
from fastfold.kernels.cpu.block_threads import for_positions, sum_blocks
from fastfold.kernels.cpu.linear import (
    PreparedLinear,
    add_product,
    centered,
    estimate,
    gradient_dtype,
    matrix_product,
    mean_of,
    product_dtype,
    reduced,
    requested_products,
    sample,
)

EPS = 1e-5


class TransitionParams(NamedTuple):
    """Parameters of :func:`fastfold.kernels.transition`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import TransitionParams, transition
        >>> norm, first, second = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        >>> parameters = TransitionParams(*norm.parameters(), *first.parameters(), *second.parameters())
        >>> transition(torch.randn(3, 5, 8), parameters).shape
        torch.Size([3, 5, 8])
    """

    norm_weight: Tensor  #: ``[c]``, scale of the normalisation
    norm_bias: Tensor  #: ``[c]``, its shift
    w1: Tensor  #: ``[n c, c]``
    b1: Tensor  #: ``[n c]``
    w2: Tensor  #: ``[c, n c]``
    b2: Tensor  #: ``[c]``


def forward(
    out: Tensor,
    x: Tensor,
    parameters: TransitionParams,
    residual: Tensor | None,
    scratch: Scratch | None = None,
    kept: Tensor | None = None,
) -> None:
    """Fill ``out``, which may be ``x`` or ``residual``, without autocast; arguments as of ``transition``.

    ``kept [positions, n c]`` is filled with the intermediate, for :func:`backward`.
    """
    norm_weight, norm_bias, w1, b1, w2, b2 = with_exact_norms(parameters, x.dtype)
    norm, positions = (norm_weight, norm_bias), x.shape[:-1].numel()
    bias: Tensor | None = b1
    mean: Tensor | None = None
    dtype = x.dtype
    if requested_products() is not None and reduced(x):
        dtype = product_dtype(x)
        norm, bias = centered(x, norm, EPS, w1, b1)
        mean = _mean_hidden(x, norm, w1, bias)
    # NaN of ``x`` stay in a residual that is ``x``.
    first = PreparedLinear(w1, bias, relu=True, keep_nan=residual is not x, positions=positions)
    second = PreparedLinear(w2, b2, positive=True, mean=mean, positions=positions)
    residuals = () if residual is None else (residual,)

    def block(
        scratch: Scratch, positions: slice, b_x: Tensor, b_out: Tensor, b_residual: Tensor | None = None
    ) -> None:
        b_norm = normalize_to(scratch.dtype, b_x, norm, EPS)
        if kept is None:
            b_hidden = first(b_norm, "hidden", scratch)
        else:
            b_hidden = first.fill(kept[positions], b_norm, scratch)
        second.update(b_out, b_hidden, b_residual, None, scratch)

    scratch = Scratch(x.device, dtype) if scratch is None else scratch.of(x, dtype)
    for_positions(block, w1.shape[0], scratch, x, out, *residuals)


def _mean_hidden(x: Tensor, norm: tuple[Tensor, Tensor], w1: Tensor, b1: Tensor | None) -> Tensor:
    """Estimate the mean over positions of the intermediate, ``[c_hidden]``."""
    normed, *_ = normalize(sample(x), *norm, EPS)
    return mean_of(estimate(normed, w1, b1).relu_())


def backward(
    grad: Tensor,
    x: Tensor,
    parameters: TransitionParams,
    add_grad: bool,
    needs: Sequence[bool],
    kept: Tensor | None = None,
) -> list[Tensor | None]:
    """Compute gradients of ``x`` and the parameters by blocks of rows, from that of the result ``[*, c]``.

    Hidden units are on the side of the ReLU on which the forward pass had them; ``kept`` has them if it kept them. With
    ``add_grad``, ``x`` is also the residual. ``needs`` has ``x`` first.
    """
    exact, dtype = accumulation_dtype(x), gradient_dtype(x)
    _, *need_each = needs
    totals = [
        torch.zeros_like(p, dtype=exact) if n else None for p, n in zip(parameters, need_each, strict=True)
    ]
    norm_weight, norm_bias = (p.to(exact) for p in parameters[:2])
    w1, b1, w2, _ = (p.to(dtype) for p in parameters[2:])
    positions = x.shape[:-1].numel()
    hidden = (
        None if kept is not None else PreparedLinear(w1, b1, relu=True, least="fp32", positions=positions)
    )

    def block(
        scratch: Scratch,
        totals: Sequence[Tensor | None],
        b_x: Tensor,
        b_grad: Tensor,
        b_grad_x: Tensor,
        b_kept: Tensor | None = None,
    ) -> None:
        grad_norm_weight, grad_norm_bias, grad_w1, grad_b1, grad_w2, grad_b2 = totals
        b_x, b_grad = b_x.to(dtype), b_grad.to(dtype)
        b_norm, *statistics = normalize(b_x, norm_weight, norm_bias, EPS)
        b_hidden = b_kept if hidden is None else hidden(b_norm, "hidden", scratch)
        assert b_hidden is not None  # kept where it is not computed
        if grad_w2 is not None:
            add_product(grad_w2, b_grad.t(), b_hidden, scratch, x)
        if grad_b2 is not None:
            grad_b2 += b_grad.sum(0)
        b_grad_hidden = matrix_product(b_grad, w2, scratch("grad_hidden", len(b_x), len(w1)))
        torch.ops.aten.threshold_backward(b_grad_hidden, b_hidden, 0, grad_input=b_grad_hidden)
        if grad_w1 is not None:
            add_product(grad_w1, b_grad_hidden.t(), b_norm, scratch, x)
        if grad_b1 is not None:
            grad_b1 += b_grad_hidden.sum(0)
        b_grad_norm = matrix_product(b_grad_hidden, w1, scratch("grad_norm", *b_x.shape))
        b_result = normalize_backward(
            b_grad_norm, b_x, statistics, norm_weight, norm_bias, grad_norm_weight, grad_norm_bias
        )
        finish(b_grad_x, b_result, b_grad if add_grad else None, None)

    grad_x = torch.empty_like(x)
    of_positions = () if kept is None else (kept.view(*x.shape[:-1], len(w1)),)
    size = gradient_positions(len(w1), positions, dtype)
    blocks = position_blocks(size, x, grad, grad_x, *of_positions)
    sum_blocks(block, blocks, Scratch().of(x, dtype), totals)
    return [grad_x, *totals]
