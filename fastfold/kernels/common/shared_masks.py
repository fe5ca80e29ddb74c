"""Results that depend on masks alone, computed once for the blocks of a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

Result = TypeVar("Result")

MAX_SHARED = 2**20  #: Elements of the largest result that is kept for further calls

_results: ContextVar[dict[Any, tuple[tuple[Tensor, ...], Any]] | None] = ContextVar("results", default=None)


def shared_masks() -> AbstractContextManager[None]:
    """Keep small results of masks for all operators inside; masks must not change there."""
    # The compiler cannot trace context variables.
    return nullcontext() if torch.compiler.is_compiling() else _sharing()


@contextmanager
def _sharing() -> Iterator[None]:
    token = _results.set({})
    try:
        yield
    finally:
        _results.reset(token)


def once(compute: Callable[[], Result], *masks: Tensor, size: int, key: Any) -> Result:
    """Return ``compute()``, or inside :func:`shared_masks` its result of an earlier call with the same masks.

    ``size`` is the result's number of elements. ``key`` tells apart functions of the same masks. Nothing may write to
    the result.
    """
    results = None if is_dynamo_compiling() else _results.get()
    if results is None or size > MAX_SHARED:
        return compute()
    places = [(x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype) for x in masks]
    place = (key, *places)
    if place not in results:
        # The masks keep their memory from being another tensor's.
        results[place] = masks, compute()
    result: Result = results[place][1]
    return result
