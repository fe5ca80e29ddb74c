"""Gated self-attention as one operator: norm, merged projections, attention, gate, output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.errors import InputError
from fastfold.kernels.common import cuequivariance
from fastfold.kernels.common.operator import Backward, define_operator
from fastfold.kernels.common.parameters import like_first
from fastfold.kernels.common.scratch import Scratch, accumulation_dtype, refuse_gradients
from fastfold.kernels.ops.attention.op import attention_backend, attention_definition
from fastfold.kernels.ops.gated_attention import passes
from fastfold.kernels.ops.gated_attention.cost import forward_cost
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams, RowBlock
from fastfold.kernels.ops.gated_attention.gradients import (
    arrange_gradients,
    backward_cost,
    compute_gradients,
    fake_gradients,
)
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition


def gated_attention_definition(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, *, heads: int, **parameters: Tensor | None
) -> Tensor:
    """Compute :func:`gated_attention` by its specification, from its :class:`~.eager.GatedAttentionParams`."""
    exact = accumulation_dtype(x)
    given: dict[str, Any] = {k: None if p is None else p.to(exact) for k, p in parameters.items()}
    w = GatedAttentionParams(**given)
    normed = layer_norm_definition(x.to(exact), w.norm_weight, w.norm_bias)

    def project(weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(normed, weight, bias).unflatten(-1, (heads, -1))

    q, k, v = project(w.query_weight), project(w.key_weight), project(w.value_weight)
    gate = None if w.gate_weight is None else project(w.gate_weight, w.gate_bias)
    out = attention_definition(q, k, v, bias, mask, gate).flatten(-2)
    return linear(out, w.output_weight, w.output_bias).to(x.dtype)


def _forward(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    heads: int,
    add_x: bool,
    backend: str,
) -> Tensor:
    operands = RowBlock(x, bias, mask, x if add_x else residual, dropout)
    group = GatedAttentionParams.of(parameters)
    return passes.forward(
        torch.empty_like(x), operands, group, heads=heads, backend=backend, scratch=Scratch()
    )


_gated_attention = define_operator(
    "gated_attention",
    _forward,
    Backward(
        compute_gradients,
        ("x", "bias", "parameters"),
        fake=fake_gradients,
        cost=backward_cost,
        residual="residual",
        constants={"begun": []},
        arrange=arrange_gradients,
    ),
    fake=like_first,
    cost=forward_cost,
)


def attention_bias(bias: Tensor, channels: int, *, backend: str | None = None) -> Tensor:
    """Lay out ``bias [*, H, N, N]`` as :func:`gated_attention` reads it, so that many calls share one copy.

    ``channels`` is their number in each head, and ``backend`` that of :func:`gated_attention`. The numbers stay; for
    Triton, rows begin at multiples of 16 elements, whatever N is.
    """
    if attention_backend(bias, channels, backend) == "torch":
        return bias.contiguous()
    from fastfold.kernels.ops.attention.triton_fwd import aligned

    return aligned(bias)


def gated_attention(
    x: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    parameters: GatedAttentionParams,
    *,
    heads: int,
    residual: Tensor | None = None,
    dropout: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute self-attention within every row, as a residual branch: ``(attention(LN(x)) · sigmoid(gate)) Oᵀ + o``.

    This is AlphaFold's MSA row and column attention (supplementary algorithms 7 and 8) and triangle attention (13 and
    14), without the projection of the pair bias. For columns pass transposed views: no copy is made.

    Args:
        x: ``[*, R, N, c]``; attention is along N.
        bias: Added to the scaled scores of every row, ``[*, H, N, N]``, or None; see :func:`attention`.
        mask: Keys to use (not 0) and to leave out (0), ``[*, R, N]``, or None; see :func:`attention`.
        parameters: Norm, projections of queries, keys, values and gate, and the output projection.
        heads: H.
        residual: ``[*, R, N, c]`` to add to the update, usually ``x`` itself.
        dropout: Factors of the update that broadcast against ``x`` (zero or 1 / keep rate). Gets no gradient.
        out: Tensor for the result, without recording gradients; may be ``x`` or ``residual``.
        scratch: With ``out``: buffers to use, which the next operator can reuse.
        backend: ``auto``, ``triton`` or ``torch``; see :func:`fastfold.kernels.attention`. ``cueq`` is NVIDIA's
            cuEquivariance if there is a bias, and ``auto`` otherwise.

    Returns:
        The update ``[*, R, N, c]``, plus the residual, in the dtype and memory layout of ``x``.

    Raises:
        InputError: Bias or mask have another shape.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded through ``out``.
    """
    *lead, rows, length, _ = x.shape
    for name, tensor, shape in (
        ("bias", bias, (*lead, heads, length, length)),
        ("mask", mask, (*lead, rows, length)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InputError(
                f"gated_attention: expected {name} {list(shape)} for x {list(x.shape)}, found {list(tensor.shape)}"
            )
    if out is not None:
        refuse_gradients(x, bias, residual, *parameters)
    if bias is not None and cuequivariance.is_requested(x, backend):
        update = cuequivariance.gated_attention(x, bias, mask, parameters, heads)
        return cuequivariance.add_to_residual(update, residual, dropout, out=out)
    backend = attention_backend(x, len(parameters.query_weight) // heads, backend)
    if out is None:
        added, group = None if residual is x else residual, parameters.present()
        options: dict[str, Any] = {"heads": heads, "add_x": residual is x, "backend": backend}
        return _gated_attention(x, bias, mask, added, dropout, group, **options)
    operands = RowBlock(x, bias, mask, residual, dropout)
    scratch = scratch or Scratch()
    return passes.forward(out, operands, parameters, heads=heads, backend=backend, scratch=scratch)
