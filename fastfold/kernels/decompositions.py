"""Decompositions of our operators into PyTorch's, for programs that read graphs of PyTorch's operators only.

``exported.run_decompositions(decompositions())`` and
``fastfold.memory.autochunk(..., decompositions=decompositions())`` replace operators by their definitions. Results are
equal within rounding; memory and speed are those of the definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastfold.kernels import reference
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams
from fastfold.kernels.ops.triangle_multiplication.params import FactorParams, TriangleParams, UpdateParams


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the definition of each forward operator, under the operator's own arguments.

    Arguments and results are the operators': any tensor, as in :mod:`fastfold.kernels.reference`.
    """
    return {getattr(torch.ops.fastfold, name).default: function for name, function in _FUNCTIONS.items()}


def _updated(
    update: Tensor, residual: Tensor | None, dropout: Tensor | None = None, x: Tensor | None = None
) -> Tensor:
    """Apply dropout and add the residual; ``x`` takes its place if given."""
    if dropout is not None:
        update = update * dropout
    residual = residual if x is None else x
    return update if residual is None else residual + update


def _attention(*operands: Tensor | None, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v, bias, mask, gate = operands
    assert q is not None
    assert k is not None
    assert v is not None
    out = reference.attention(q, k, v, bias, mask, gate, scale)
    return out, q.new_empty(0, dtype=torch.float32)


def _gated_attention(x: Tensor, *others: Tensor | None, heads: int, add_x: bool, backend: str) -> Tensor:
    bias, mask, residual, dropout, *parameters = others
    given = GatedAttentionParams._make(parameters)._asdict()
    update = reference.gated_attention(x, bias, mask, heads=heads, **given)
    return _updated(update, residual, dropout, x if add_x else None)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    return reference.layer_norm(x, weight, bias, eps)


def _outer_product_mean(
    inputs: Sequence[Tensor], residual: Tensor | None, eps: float, backend: str
) -> Tensor:
    left, right, left_mask, right_mask, weight, bias = inputs
    return _updated(
        reference.outer_product_mean(left, right, left_mask, right_mask, weight, bias, eps), residual
    )


def _pair_bias(z: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    return reference.pair_bias(z, *parameters)


def _residual_update(*operands: Tensor | None, backend: str) -> Tensor:
    x, *others = operands
    assert x is not None
    return reference.residual_update(x, *others)


def _softmax(scores: Tensor, bias: Tensor | None, mask: Tensor | None, backend: str) -> Tensor:
    return reference.softmax(scores, bias, mask)


def _transition(
    x: Tensor, residual: Tensor | None, add_x: bool, parameters: Sequence[Tensor], backend: str
) -> Tensor:
    return _updated(reference.transition(x, *parameters), residual, x=x if add_x else None)


def _triangle_factors(z: Tensor, mask: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    return reference.triangle_factors(z, mask, **FactorParams._make(parameters)._asdict())


def _triangle_multiplication(
    z: Tensor,
    mask: Tensor,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    outgoing: bool,
    add_z: bool,
    backend: str,
) -> Tensor:
    given = TriangleParams._make(parameters)._asdict()
    update = reference.triangle_multiplication(z, mask, outgoing=outgoing, **given)
    return _updated(update, residual, dropout, z if add_z else None)


def _triangle_update(
    product: Tensor,
    z: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    add_z: bool,
    backend: str,
) -> Tensor:
    update = reference.triangle_update(product, z, **UpdateParams._make(parameters)._asdict())
    return _updated(update, None, dropout, z if add_z else None)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "gated_attention": _gated_attention,
    "layer_norm": _layer_norm,
    "outer_product_mean": _outer_product_mean,
    "pair_bias": _pair_bias,
    "residual_update": _residual_update,
    "softmax": _softmax,
    "transition": _transition,
    "triangle_factors": _triangle_factors,
    "triangle_multiplication": _triangle_multiplication,
    "triangle_update": _triangle_update,
}
