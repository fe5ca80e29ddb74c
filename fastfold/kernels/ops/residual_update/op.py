"""The end of a residual branch in one pass: bias, gate, dropout and the addition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold.errors import InputError
from fastfold.kernels.common.backend import rows_run_on_triton
from fastfold.kernels.common.gradients import unwritten_gradients, wanted_gradients
from fastfold.kernels.common.scratch import exact_dtype, refuse_gradients, without_autocast


def residual_update_definition(
    x: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    dropout: Tensor | None = None,
) -> Tensor:
    """Specification of :func:`residual_update`."""
    exact = exact_dtype(x)
    out = x.to(exact)
    if bias is not None:
        out = out + bias.to(exact)
    if gate is not None:
        out = out * gate.to(exact).sigmoid()
    if dropout is not None:
        out = out * dropout.to(exact)
    if residual is not None:
        out = out + residual.to(exact)
    return out.to(x.dtype)


@without_autocast
def fill_update(
    out: Tensor,
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout: Tensor | None,
    backend: str | None,
) -> None:
    """Fill ``out``, which may be ``x``, ``residual`` or ``gate``, with what :func:`residual_update` gives."""
    if rows_run_on_triton(x, backend):
        from fastfold.kernels.ops.residual_update.triton_fwd import write_update

        write_update(out, x, residual, bias, gate, dropout)
    else:
        out.copy_(residual_update_definition(x, residual, bias, gate, dropout))


@torch.library.custom_op("fastfold::residual_update", mutates_args=())
def _residual_update(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout: Tensor | None,
    backend: str | None,
) -> Tensor:
    out = torch.empty_like(x)
    fill_update(out, x, residual, bias, gate, dropout, backend)
    return out


@_residual_update.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout: Tensor | None,
    backend: str | None,
) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fastfold::residual_update_backward", mutates_args=())
@without_autocast
def _residual_update_backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout: Tensor | None,
    need_bias: bool,
    backend: str | None,
) -> list[Tensor]:
    """Gradients of ``x``, ``bias`` and ``gate``; empty for what is not there or not needed."""
    inputs = [x if t is None else t for t in (x, bias, gate)]
    needs = [True, need_bias, gate is not None]
    if rows_run_on_triton(x, backend):
        from fastfold.kernels.ops.residual_update.triton_bwd import update_backward

        return wanted_gradients(update_backward(grad, x, bias, gate, dropout, need_bias), inputs, needs)
    exact = exact_dtype(x)
    grad_x = grad.to(exact)
    if dropout is not None:
        grad_x = grad_x * dropout.to(exact)
    grad_gate = None
    if gate is not None:
        opened = gate.to(exact).sigmoid()
        shifted = x.to(exact) if bias is None else x.to(exact) + bias.to(exact)
        grad_gate = grad_x * shifted * opened * (1 - opened)
        grad_x = grad_x * opened
    grad_bias = grad_x.flatten(0, -2).sum(0) if need_bias else None
    # A copy, because an operator returns no input of its own.
    grads = [grad_x.clone() if grad_x is grad else grad_x, grad_bias, grad_gate]
    return wanted_gradients(grads, inputs, needs)


@_residual_update_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout: Tensor | None,
    need_bias: bool,
    backend: str | None,
) -> list[Tensor]:
    inputs = [x if t is None else t for t in (x, bias, gate)]
    return unwritten_gradients(inputs, [True, need_bias, gate is not None])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep inputs alone; of ``x`` the backward pass without a gate needs no more than its shape."""
    x, _, bias, gate, dropout, ctx.backend = inputs
    ctx.save_for_backward(x, bias, gate, dropout)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, gate, dropout = ctx.saved_tensors
    need_x, need_residual, need_bias, need_gate, *_ = ctx.needs_input_grad
    grad_x, grad_bias, grad_gate = _residual_update_backward(
        grad, x, bias, gate, dropout, need_bias, ctx.backend
    )
    return (
        grad_x if need_x else None,
        grad if need_residual else None,
        grad_bias if need_bias else None,
        grad_gate if need_gate else None,
        None,
        None,
    )


_residual_update.register_autograd(_differentiate, setup_context=_keep)


def residual_update(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    dropout: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``residual + dropout · sigmoid(gate) · (x + bias)``: how every branch of the Evoformer ends.

    The residual additions of supplement algorithm 6, with dropout shared by rows or columns (section 1.11.6), behind
    the biased and gated output of a branch (as in algorithm 11, line 4): each tensor is read and written once.

    Args:
        x: ``[*, c]``, output of a projection without its bias; any strides.
        residual: ``[*, c]``, or None to leave it out, as all that follow.
        bias: ``[c]``, added to ``x``.
        gate: Logits ``[*, c]`` of the gate.
        dropout: Factors that broadcast against ``x`` (zero or 1 / keep rate): ``[*, 1, N, c]`` are shared by rows, and
            ``[*, N, 1, c]`` by columns. A constant.
        out: Where the result goes, without recording gradients; may be ``x``, ``residual`` or ``gate``.
        backend: As in :func:`fastfold.kernels.common.backend.choose_backend`; rows of more than 4,096 channels are
            PyTorch's in any case.

    Returns:
        ``[*, c]`` in the dtype and memory layout of ``x``, rounded once.

    Raises:
        InputError: A shape does not belong to that of ``x``.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: If gradients would have to be recorded through ``out``.
    """
    wanted = {
        "residual": (residual, x.shape),
        "bias": (bias, x.shape[-1:]),
        "gate": (gate, x.shape),
        "out": (out, x.shape),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise InputError(
                f"residual_update: {name} is {list(tensor.shape)}; give {list(shape)} for x {list(x.shape)}"
            )
    if dropout is not None:
        try:
            dropout = dropout.expand_as(x)
        except RuntimeError as error:
            raise InputError(
                f"residual_update: dropout {list(dropout.shape)} does not broadcast against x {list(x.shape)}"
            ) from error
    if out is None:
        return _residual_update(x, residual, bias, gate, dropout, backend)
    refuse_gradients(x, residual, bias, gate)
    fill_update(out, x, residual, bias, gate, dropout, backend)
    return out
