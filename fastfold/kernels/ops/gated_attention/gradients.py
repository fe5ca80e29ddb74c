"""Backward operator of gated attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastfold.kernels.common.cost import Arguments, OperatorCost, size_in_bytes
from fastfold.kernels.common.scratch import accumulation_dtype
from fastfold.kernels.ops.gated_attention import passes
from fastfold.kernels.ops.gated_attention.cost import flops_of, scores_of, without_beginning
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams, RowBlock, Weights, gradients_of


def compute_gradients(
    grad: Tensor,
    x: Tensor,
    begun: Sequence[Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    needs: Sequence[bool],
    heads: int,
    add_x: bool,
    backend: str,
) -> list[Tensor]:
    """Return gradients of ``x``, of the bias if given and needed, and of the parameters as in :class:`~.eager.Weights`.

    Arguments are those of :func:`~.passes.backward`, by the same names. Of ``needs`` only the bias's is read.
    """
    given = GatedAttentionParams.of(parameters)
    grad_x, grad_bias, totals = passes.backward(
        *(grad, RowBlock(x, bias, mask, dropout=dropout), given),
        begun=begun,
        heads=heads,
        add_x=add_x,
        backend=backend,
        need_bias=needs[1],
    )
    found = zip(_flat(totals), _flat(_first_of_each(given)), strict=True)
    of_parameters = [g.to(p.dtype) for g, p in found if g is not None and p is not None]
    return [grad_x, *([] if grad_bias is None else [grad_bias]), *of_parameters]


def fake_gradients(call: Arguments) -> list[Tensor]:
    """Return uninitialised results of :func:`compute_gradients`."""
    x, bias, p = call["x"], call["bias"], GatedAttentionParams.of(call["parameters"])
    found = [torch.empty_like(x)]
    if bias is not None and call["needs"][1]:
        found.append(bias.new_empty(bias.shape, dtype=accumulation_dtype(x)))
    merged = (3 + (p.gate_weight is not None)) * len(p.query_weight), x.shape[-1]
    firsts = [first for first in _flat(_first_of_each(p)) if first is not None]
    return found + [first.new_empty(merged if first is p.query_weight else first.shape) for first in firsts]


def arrange_gradients(found: list[Tensor], call: Arguments) -> list[Tensor | None]:
    """Return the gradients of ``x``, bias and parameters; views of the operator's results."""
    rest = iter(found)
    grad_x, grad_bias = next(rest), next(rest) if call["needs"][1] else None
    return [grad_x, grad_bias, *gradients_of_parameters(rest, call["parameters"])]


def gradients_of_parameters(found: Iterable[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Arrange the operator's results after those of ``x`` and bias as gradients of the parameters; views."""
    p, rest = GatedAttentionParams.of(parameters), iter(found)
    norm, merged = (next(rest), next(rest)), next(rest)
    gate_bias = None if p.gate_bias is None else next(rest)
    return gradients_of(Weights(norm, merged, gate_bias, next(rest), next(rest))).present()


def _flat(weights: Weights) -> tuple[Tensor | None, ...]:
    return (*weights.norm, weights.merged, weights.bias, weights.output, weights.output_bias)


def _first_of_each(parameters: GatedAttentionParams) -> Weights:
    """Return the parameters as :class:`Weights`, with the first parameter in the place of merged ones."""
    p = parameters
    return Weights((p.norm_weight, p.norm_bias), p.query_weight, p.gate_bias, p.output_weight, p.output_bias)


def backward_cost(call: Arguments) -> OperatorCost:
    """Return the cost of a backward pass."""
    projections, attention, output = flops_of(call)
    flops = 3 * projections + 3.5 * attention + 2 * output
    traffic = 25 * size_in_bytes(call["x"])
    whole = OperatorCost(flops, traffic, launches=14, exponentials=scores_of(call))
    return without_beginning(call, whole)
