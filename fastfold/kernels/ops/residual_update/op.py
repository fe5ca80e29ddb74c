"""End of a residual branch in one pass: bias, gate, dropout and the addition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastfold.errors import InputError
from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.layout import MAX_ROW_LENGTH
from fastfold.kernels.common.operator import BackwardPass, define_operator
from fastfold.kernels.common.parameters import cast_grads, like_first
from fastfold.kernels.common.scratch import accumulation_dtype, refuse_gradients, without_autocast
from fastfold.kernels.common.shapes import axes_of, check_shapes
from fastfold.kernels.ops.residual_update.operands import UpdateOperands


def residual_update_definition(
    x: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    dropout: Tensor | None = None,
) -> Tensor:
    """Compute :func:`residual_update` by its specification."""
    exact = accumulation_dtype(x)
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
def fill_update(out: Tensor, operands: UpdateOperands, backend: str) -> None:
    """Fill ``out``, which may be ``x``, ``residual`` or ``gate``, with the result of :func:`residual_update`."""
    if backend == "triton":
        from fastfold.kernels.ops.residual_update.triton_fwd import write_update

        write_update(out, operands)
    else:
        out.copy_(residual_update_definition(*operands))


def _forward(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout: Tensor | None,
    *,
    backend: str,
) -> Tensor:
    out = torch.empty_like(x)
    fill_update(out, UpdateOperands(x, residual, bias, gate, dropout), backend)
    return out


def _backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout: Tensor | None,
    needs: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    """Return gradients of ``x``, ``bias`` and ``gate``; empty tensors for missing ones and those not needed."""
    inputs = [x if t is None else t for t in (x, bias, gate)]
    need_bias = needs[1]
    if backend == "triton":
        from fastfold.kernels.ops.residual_update.triton_bwd import update_backward

        return cast_grads(update_backward(grad, x, bias, gate, dropout, need_bias), inputs, needs)
    exact = accumulation_dtype(x)
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
    # A copy, because an operator must not return its input.
    grads = [grad_x.clone() if grad_x is grad else grad_x, grad_bias, grad_gate]
    return cast_grads(grads, inputs, needs)


_residual_update = define_operator(
    "residual_update",
    _forward,
    BackwardPass(_backward, ("x", "bias", "gate"), residual="residual"),
    fake=like_first,
)


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
    """Compute ``residual + dropout · sigmoid(gate) · (x + bias)``, the end of every branch of the Evoformer.

    These are the residual additions of supplement algorithm 6, with dropout shared by rows or columns (section 1.11.6),
    after the biased and gated output of a branch (as in algorithm 11, line 4). Each tensor is read and written once.

    Args:
        x: ``[*, c]``, output of a projection without its bias; any strides.
        residual: ``[*, c]``, or None to leave it out; so for all arguments below.
        bias: ``[c]``, added to ``x``.
        gate: Logits ``[*, c]`` of the gate.
        dropout: Factors that broadcast against ``x`` (zero or 1 / keep rate): ``[*, 1, N, c]`` are shared by rows, and
            ``[*, N, 1, c]`` by columns. Gets no gradient.
        out: Tensor for the result, without recording gradients; may be ``x``, ``residual`` or ``gate``.
        backend: As in :func:`fastfold.kernels.common.backend.choose_backend`; rows of more than 4,096 channels always
            use PyTorch.

    Returns:
        ``[*, c]`` in the dtype and memory layout of ``x``, rounded once.

    Raises:
        InputError: A shape does not match that of ``x``.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded through ``out``.

    Example:
        >>> import torch
        >>> from fastfold.kernels import residual_update
        >>> x, residual, gate = torch.randn(3, 5, 6, 16)
        >>> bias, dropout = torch.randn(16), 2 * torch.ones(5, 1, 16).bernoulli(0.5)
        >>> found = residual_update(x, residual, bias=bias, gate=gate, dropout=dropout)
        >>> torch.allclose(found, residual + dropout * gate.sigmoid() * (x + bias), atol=1e-5)
        True
    """
    channels = axes_of("residual_update", "x", x.shape, "c", x.dtype)[-1:]
    wanted = (
        ("residual", None if residual is None else residual.shape, x.shape),
        ("bias", None if bias is None else bias.shape, channels),
        ("gate", None if gate is None else gate.shape, x.shape),
        ("out", None if out is None else out.shape, x.shape),
    )
    check_shapes("residual_update", "x", x.shape, wanted)
    if dropout is not None:
        try:
            dropout = dropout.expand_as(x)
        except RuntimeError as error:
            raise InputError(
                f"residual_update: dropout {list(dropout.shape)} does not broadcast against x {list(x.shape)}"
            ) from error
    backend = choose_backend(x, backend, fits=x.shape[-1] <= MAX_ROW_LENGTH)
    operands = UpdateOperands(x, residual, bias, gate, dropout)
    if out is None:
        return _residual_update(*operands, backend=backend)
    refuse_gradients(x, residual, bias, gate)
    fill_update(out, operands, backend)
    return out
