"""Operators of the kernels that take every tensor of their parameter group by its name, as their definitions do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastfold import kernels
from fastfold.kernels import (
    FactorParams,
    GatedAttentionParams,
    TransitionParams,
    TriangleParams,
    UpdateParams,
)


def _by_name(operator: Callable[..., Tensor], group: Any) -> Callable[..., Tensor]:
    @functools.wraps(operator)
    def call(*arguments: Any, **named: Any) -> Tensor:
        parameters = group(**{name: named.pop(name) for name in group._fields})
        return operator(*arguments, parameters=parameters, **named)

    own = inspect.signature(operator).parameters
    fields = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in group._fields]
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [x for p in own.values() for x in (fields if p.name == "parameters" else [p])]
    )
    return call


gated_attention = _by_name(kernels.gated_attention, GatedAttentionParams)
transition = _by_name(kernels.transition, TransitionParams)
triangle_factors = _by_name(kernels.triangle_factors, FactorParams)
triangle_multiplication = _by_name(kernels.triangle_multiplication, TriangleParams)
triangle_update = _by_name(kernels.triangle_update, UpdateParams)
