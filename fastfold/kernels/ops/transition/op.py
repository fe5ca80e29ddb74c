"""Transition: the two-layer perceptron that acts on every element of a representation.

In PyTorch, the intermediate exists for one block of positions at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear, relu

from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost
from fastfold.kernels.common.layout import MAX_CHANNELS
from fastfold.kernels.common.operator import BackwardPass, define_operator, kept_memory
from fastfold.kernels.common.parameters import cast_grads, needed_names, with_exact_norms
from fastfold.kernels.common.scratch import (
    Scratch,
    accumulation_dtype,
    autocast_is_enabled,
    finish,
    gradient_positions,
    normalize,
    normalize_backward,
    normalize_to,
    position_blocks,
    refuse_gradients,
    without_autocast,
)
from fastfold.kernels.common.shapes import Shape, axes_of, check_shapes
from fastfold.kernels.cpu.block_threads import for_positions, sum_blocks
from fastfold.kernels.cpu.linear import (
    PreparedLinear,
    add_product,
    can_keep,
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
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.transition.params import EPS, TransitionParams


def transition_definition(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    """Compute :func:`transition` by its specification."""
    exact = accumulation_dtype(x)
    hidden = layer_norm_definition(x.to(exact), norm_weight, norm_bias)
    hidden = relu(linear(hidden, w1.to(exact), b1.to(exact)))
    return linear(hidden, w2.to(exact), b2.to(exact)).to(x.dtype)


def forward(
    out: Tensor,
    x: Tensor,
    parameters: TransitionParams,
    residual: Tensor | None,
    scratch: Scratch | None = None,
    kept: Tensor | None = None,
    *,
    backend: str = "torch",
) -> Tensor:
    """Fill ``out``, which may be ``x`` or ``residual``, without autocast; arguments as of :func:`transition`.

    PyTorch fills ``kept [positions, n c]`` with the intermediate, for :func:`backward`.
    """
    if backend == "triton":
        from fastfold.kernels.ops.transition import triton_fwd

        triton_fwd.forward(out, x, parameters, residual)
        return out
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
    return out


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


def _operator(
    x: Tensor, residual: Tensor | None, add_x: bool, parameters: Sequence[Tensor], keep: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Return the result, and with ``keep`` the intermediate that :func:`backward` takes."""
    group, kept = TransitionParams(*parameters), _empty_kept(x, parameters, keep)
    residual = x if add_x else residual
    out = forward(torch.empty_like(x), x, group, residual, kept=kept if keep else None, backend=backend)
    return out, kept


def _empty_kept(x: Tensor, parameters: Sequence[Tensor], keep: bool) -> Tensor:
    """Return room for the intermediate of all positions if it is kept, ``[positions, n c]``, else for nothing."""
    hidden = len(TransitionParams(*parameters).w1)
    return x.new_empty(x.shape[:-1].numel(), hidden) if keep else x.new_empty(0)


def _fake(
    x: Tensor, residual: Tensor | None, add_x: bool, parameters: Sequence[Tensor], keep: bool, backend: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _empty_kept(x, parameters, keep)


def _backward(
    grad: Tensor,
    x: Tensor,
    out: Sequence[Tensor],
    parameters: Sequence[Tensor],
    add_x: bool,
    needs: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    """Return gradients of ``x`` and the parameters; empty tensors for those not needed.

    ``out`` has the intermediate if it was kept, else nothing.
    """
    group = TransitionParams(*parameters)
    if backend == "triton":
        from fastfold.kernels.ops.transition import triton_bwd

        needed = needed_names(("x", *group._fields), needs)
        grads = triton_bwd.backward(grad, x, group, add_x, needed)
    else:
        grads = backward(grad, x, group, add_x, needs, *out)
    return cast_grads(grads, (x, *parameters), needs)


def transition_flops(positions: int, channels: int, hidden: int) -> float:
    """Return the operations of :func:`transition` at a number of positions."""
    return 4.0 * positions * channels * hidden


def _cost(call: Arguments) -> OperatorCost:
    *positions, channels = call["x"].shape
    hidden = TransitionParams(*call["parameters"]).w1.shape[0]
    return OperatorCost(transition_flops(math.prod(positions), channels, hidden))


def _backward_cost(call: Arguments) -> OperatorCost:
    # Five products instead of the forward pass' two if the hidden channels are computed again.
    products = 2.0 if call["out"] else 2.5
    return OperatorCost(products * _cost(call).flops, launches=3)


@functools.lru_cache(maxsize=1024)
def _check(
    dtype: torch.dtype, x: Shape, residual: Shape | None, out: Shape | None, *parameters: Shape
) -> None:
    c = axes_of("transition", "x", x, "c", dtype)[-1]
    hidden = axes_of("transition", "b1", parameters[TransitionParams._fields.index("b1")], "n c")[-1]
    shapes = (c,), (c,), (hidden, c), (hidden,), (c, hidden), (c,)
    of_parameters = zip(TransitionParams._fields, parameters, shapes, strict=True)
    check_shapes("transition", "x", x, (("residual", residual, x), ("out", out, x), *of_parameters))


_transition = define_operator(
    "transition",
    _operator,
    BackwardPass(
        _backward,
        ("x", "parameters"),
        cost=_backward_cost,
        residual="residual",
        saved_result=kept_memory,
    ),
    fake=_fake,
    cost=_cost,
)


def transition(
    x: Tensor,
    parameters: TransitionParams,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    keep: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute ``relu(LN(x) w1ᵀ + b1) w2ᵀ + b2`` (AlphaFold supplement, algorithms 9 and 15).

    Args:
        x: ``[*, c]``, any strides.
        parameters: Norm and both layers; the intermediate has n·c channels (4·c in AlphaFold).
        residual: ``[*, c]`` to add to the update, usually ``x`` itself.
        out: Tensor for the result, without recording gradients; may be ``x`` or ``residual``.
        scratch: With ``out``: buffers to use, which the next operator can reuse.
        keep: While gradients are recorded, let PyTorch's path keep the intermediate for the backward pass, which has
            less to compute then.
        backend: ``auto``, ``triton`` (up to 256 channels; more use PyTorch) or ``torch``.

    Returns:
        The update ``[*, c]``, plus the residual, in the dtype of ``x``.

    Raises:
        InputError: A shape does not match that of ``x``.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded through ``out``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import TransitionParams, transition
        >>> plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> x = torch.randn(5, 8)
        >>> found = transition(x, TransitionParams(*plain.parameters()), residual=x)
        >>> torch.allclose(found, x + plain(x), atol=1e-5)
        True
    """
    check = _check if type(x) is Tensor and not is_dynamo_compiling() else _check.__wrapped__
    of_residual = None if residual is None else residual.shape
    of_out = None if out is None else out.shape
    check(x.dtype, x.shape, of_residual, of_out, *map(getattr, parameters, repeat("shape")))
    backend = choose_backend(x, backend, fits=x.shape[-1] <= MAX_CHANNELS)
    if out is None:
        added, keep = None if residual is x else residual, keep and backend == "torch" and can_keep(x)
        return _transition(x, added, residual is x, parameters, keep, backend)[0]
    if torch.is_grad_enabled():
        refuse_gradients(x, residual, *parameters)
    compute = without_autocast(forward) if autocast_is_enabled() else forward
    return compute(out, x, parameters, residual, scratch, backend=backend)
