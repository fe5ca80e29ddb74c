"""Decompositions of our operators into PyTorch's, for programs that read graphs of PyTorch's operators only.

``exported.run_decompositions(decompositions())`` and
``fastfold.memory.autochunk(..., decompositions=decompositions())`` replace operators by their definitions. Results are
equal within rounding; memory and speed are those of the definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastfold.kernels import reference
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams
from fastfold.kernels.ops.outer_product_mean.eager import OuterProductParams
from fastfold.kernels.ops.pair_bias.params import PairBiasParams
from fastfold.kernels.ops.transition.params import TransitionParams
from fastfold.kernels.ops.triangle_multiplication.params import FactorParams, TriangleParams, UpdateParams

_GROUPS: dict[str, Any] = {
    "outer_product_mean": OuterProductParams,
    "pair_bias": PairBiasParams,
    "transition": TransitionParams,
    "triangle_factors": FactorParams,
    "triangle_multiplication": TriangleParams,
    "triangle_update": UpdateParams,
}
"""Groups of the operators' lists of tensors, with the names of the definitions' arguments."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the definition of each forward operator, under the operator's own arguments.

    Arguments and results are the operators': any tensor, as in :mod:`fastfold.kernels.reference`.
    """
    operators = {name: getattr(torch.ops.fastfold, name).default for name in reference.__all__}
    return {operator: partial(_decompose, name, operator) for name, operator in operators.items()}


def _decompose(name: str, operator: Any, *arguments: Any, **options: Any) -> Any:
    call = dict(zip((x.name for x in operator._schema.arguments), arguments, strict=False)) | options
    for option in ("backend", "keep"):  # of the operators alone
        call.pop(option, None)
    if name in _GROUPS:
        lists = (call.pop(key, ()) for key in ("sides", "masks", "parameters"))
        call |= _GROUPS[name](*(x for tensors in lists for x in tensors))._asdict()
    elif name == "attention":
        call |= dict(zip("qkv", call.pop("qkv"), strict=True))
    elif name == "gated_attention":
        call |= GatedAttentionParams.of(call.pop("parameters"))._asdict()
    definition = getattr(reference, name)
    if name == "residual_update":
        return definition(**call)
    residual, dropout = call.pop("residual", None), call.pop("dropout", None)
    for flag, x in (("add_x", "x"), ("add_z", "z")):
        if call.pop(flag, False):
            residual = call[x]
    update = definition(**call)
    if name == "attention":  # without sums of exponentials
        return update, update.new_empty(0, dtype=torch.float32)
    update = update if dropout is None else update * dropout
    update = update if residual is None else residual + update
    # Nothing is kept for a backward pass.
    has_kept = name in ("gated_attention", "transition", "triangle_multiplication")
    return (update, update.new_empty(0)) if has_kept else update
