"""Groups of parameters, which operators of torch.library take as flat lists, and their gradients.

A backward operator returns a list with one tensor per input; the tensor is empty if its gradient is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_not
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Params = TypeVar("Params", bound=NamedTuple)

_dtype_of, _is_given = attrgetter("dtype"), partial(is_not, None)


def in_dtype(parameters: Params, dtype: torch.dtype) -> Params:
    """Return contiguous parameters for kernels: names that begin with ``norm`` in float32, others in ``dtype``."""
    return parameters._make(
        x.to(torch.float32 if name.startswith("norm") else dtype).contiguous()
        for name, x in zip(parameters._fields, parameters, strict=True)
    )


def with_exact_norms(parameters: Params, dtype: torch.dtype) -> Params:
    """Return parameters for PyTorch: names that begin with ``norm`` in an exact dtype, others in ``dtype``."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    # No list and no cast where nothing changes, because each layer comes here in each call.
    if dtype == exact:
        if set(map(_dtype_of, filter(_is_given, parameters))) == {dtype}:
            return parameters
    else:
        for name, x in zip(parameters._fields, parameters, strict=True):
            if x is not None and x.dtype != (exact if name.startswith("norm") else dtype):
                break
        else:
            return parameters
    return parameters._make(
        None if x is None else x.to(exact if name.startswith("norm") else dtype)
        for name, x in zip(parameters._fields, parameters, strict=True)
    )


def zeros_of(parameters: Params, dtype: torch.dtype) -> Params:
    """Return zeros in the shapes of the parameters, to sum their gradients in."""
    return parameters._make(torch.zeros_like(x, dtype=dtype) for x in parameters)


class Totals:
    """Sums of gradients over blocks; the first block's tensors are kept and the others added to them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, **gradients: Tensor) -> None:
        """Add gradients of one block, by the parameters' names; the tensors may be overwritten."""
        for name, gradient in gradients.items():
            if name in self._sums:
                self._sums[name].add_(gradient)
            else:
                self._sums[name] = gradient

    def of(self, parameters: Params, needed: Collection[str]) -> list[Tensor | None]:
        """Return the sums of all parameters, in order.

        A ``needed`` parameter without any gradient gets zeros in float32, any other gets None.
        """
        gradients: list[Tensor | None] = []
        for name, x in zip(parameters._fields, parameters, strict=True):
            gradient = self._sums.get(name)
            if gradient is None and name in needed:
                gradient = torch.zeros_like(x, dtype=torch.float32)
            gradients.append(gradient)
        return gradients


def needed_names(names: Iterable[str], needs: Iterable[bool]) -> frozenset[str]:
    """Return the names of inputs that need a gradient."""
    return frozenset(name for name, need in zip(names, needs, strict=True) if need)


def cast_grads(
    grads: Sequence[Tensor | None], inputs: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:
    """Return gradients in the dtypes of their inputs; empty tensors replace gradients that are not needed."""
    # Gradients that are needed have any floating dtype. Each result has its own memory, as results of an operator
    # must.
    return [
        x.new_empty(0) if g is None or not need else _ensure_own_storage(g.to(x.dtype))
        for g, x, need in zip(grads, inputs, needs, strict=True)
    ]


def _ensure_own_storage(x: Tensor) -> Tensor:
    """Return ``x``, or a copy if it is a part of a larger storage."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def empty_grads(inputs: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Return uninitialised tensors with the shapes and dtypes of :func:`cast_grads`."""
    return [torch.empty_like(x) if need else x.new_empty(0) for x, need in zip(inputs, needs, strict=True)]


def grads_or_none(grads: Iterable[Tensor | None], needs: Iterable[bool]) -> list[Any]:
    """Return a backward operator's list with None for gradients that are not needed, as autograd expects."""
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


def like_first(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return an uninitialised tensor like the first argument; fake of an operator whose result is like that."""
    return torch.empty_like(x)
