"""Groups of parameters, which operators of torch.library take as flat lists, and their gradients.

A backward operator returns a list with an entry for every input, empty where nobody needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Params = TypeVar("Params", bound=NamedTuple)


def in_dtype(parameters: Params, dtype: torch.dtype) -> Params:
    """Contiguous parameters as kernels read them: those whose names begin with ``norm`` in float32."""
    return parameters._make(
        x.to(torch.float32 if name.startswith("norm") else dtype).contiguous()
        for name, x in zip(parameters._fields, parameters, strict=True)
    )


def zeros_of(parameters: Params, dtype: torch.dtype) -> Params:
    """Totals that the gradients of the parameters are added to."""
    return parameters._make(torch.zeros_like(x, dtype=dtype) for x in parameters)


class Totals:
    """Sums of the gradients of blocks: those of the first block are kept as they are, the others added to them."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def add(self, **gradients: Tensor) -> None:
        """Those of one block by the parameters' names; they may be overwritten."""
        for name, gradient in gradients.items():
            if name in self._found:
                self._found[name].add_(gradient)
            else:
                self._found[name] = gradient

    def of(self, parameters: Params, needed: Collection[str]) -> list[Tensor | None]:
        """Those of all parameters, in order: zeros in float32 where no block had one that is needed, else None."""
        found: list[Tensor | None] = []
        for name, x in zip(parameters._fields, parameters, strict=True):
            gradient = self._found.get(name)
            if gradient is None and name in needed:
                gradient = torch.zeros_like(x, dtype=torch.float32)
            found.append(gradient)
        return found


def needed_names(names: Iterable[str], needs: Iterable[bool]) -> frozenset[str]:
    """Names of the inputs that need a gradient."""
    return frozenset(name for name, need in zip(names, needs, strict=True) if need)


def cast_grads(
    grads: Sequence[Tensor | None], inputs: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients in the dtypes of their inputs, and empty tensors in place of those that nobody needs.

    Each in memory of its own, as results of an operator have to be.

    Args:
        grads: In any floating dtype; None only where not needed.
        inputs: What they are gradients of.
        needs: Which of them are needed.
    """
    return [
        x.new_empty(0) if g is None or not need else _alone(g.to(x.dtype))
        for g, x, need in zip(grads, inputs, needs, strict=True)
    ]


def _alone(x: Tensor) -> Tensor:
    """``x``, or a copy if it is a part of something."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def empty_grads(inputs: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """What :func:`cast_grads` returns, by shapes alone."""
    return [torch.empty_like(x) if need else x.new_empty(0) for x, need in zip(inputs, needs, strict=True)]


def grads_or_none(grads: Iterable[Tensor | None], needs: Iterable[bool]) -> list[Any]:
    """What autograd gets of the list of a backward operator."""
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


def like_first(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """By shape alone, the result of an operator that is like its first argument."""
    return torch.empty_like(x)
