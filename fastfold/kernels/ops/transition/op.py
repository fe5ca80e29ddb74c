"""Transition: the two-layer perceptron that acts on every element of a representation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost
from fastfold.kernels.common.layout import MAX_CHANNELS
from fastfold.kernels.common.operator import BackwardPass, define_operator, kept_memory
from fastfold.kernels.common.parameters import cast_grads, needed_names
from fastfold.kernels.common.scratch import (
    Scratch,
    accumulation_dtype,
    autocast_is_enabled,
    refuse_gradients,
    without_autocast,
)
from fastfold.kernels.cpu.linear import can_keep
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.transition import eager
from fastfold.kernels.ops.transition.eager import TransitionParams


def transition_definition(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    """Compute :func:`transition` by its specification."""
    exact = accumulation_dtype(x)
    hidden = layer_norm_definition(x.to(exact), norm_weight, norm_bias)
    hidden = relu(linear(hidden, w1.to(exact), b1.to(exact)))
    return linear(hidden, w2.to(exact), b2.to(exact)).to(x.dtype)


def _forward(
    out: Tensor,
    x: Tensor,
    parameters: TransitionParams,
    residual: Tensor | None,
    scratch: Scratch | None,
    backend: str,
    kept: Tensor | None = None,
) -> Tensor:
    """Fill ``out``, which may be ``x`` or ``residual``, and in PyTorch ``kept`` as :func:`eager.forward` does."""
    if backend == "triton":
        from fastfold.kernels.ops.transition import triton_fwd

        without_autocast(triton_fwd.forward)(out, x, parameters, residual)
    else:
        compute = without_autocast(eager.forward) if autocast_is_enabled() else eager.forward
        compute(out, x, parameters, residual, scratch, kept)
    return out


def _operator(
    x: Tensor, residual: Tensor | None, add_x: bool, parameters: Sequence[Tensor], keep: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Return the result, and with ``keep`` the intermediate that :func:`eager.backward` takes."""
    group, kept = TransitionParams(*parameters), _empty_kept(x, parameters, keep)
    residual = x if add_x else residual
    out = _forward(
        torch.empty_like(x), x, group, residual, None, backend=backend, kept=kept if keep else None
    )
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
        grads = eager.backward(grad, x, group, add_x, needs, *out)
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
    backend = choose_backend(x, backend, fits=x.shape[-1] <= MAX_CHANNELS)
    if out is None:
        added, keep = None if residual is x else residual, keep and backend == "torch" and can_keep(x)
        return _transition(x, added, residual is x, parameters, keep, backend)[0]
    if torch.is_grad_enabled():
        refuse_gradients(x, residual, *parameters)
    return _forward(out, x, parameters, residual, scratch, backend)
