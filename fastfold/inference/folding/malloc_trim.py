"""Keep freed memory for the next step of a fold on a CPU, or return it to the system.

The C library (glibc) keeps freed blocks of up to 32 MiB, but returns them when they reach the end of its heap. Where
memory is ample, the next step would get the same pages again, each by a fault of its own; measurements are in
``benchmarks/results/choices.md``. Where it is not, the next step allocates larger blocks in addition, so the heap is
trimmed before the steps that need the most memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication

LARGEST_BLOCK = 32 << 20  #: Bytes of the largest block in the heap: glibc's own limit
KEPT = 2 * LARGEST_BLOCK
"""Bytes of free memory that the end of the heap keeps: the most that glibc chooses for such blocks."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h


@functools.cache
def keep_freed_memory() -> None:
    """Let this process use freed memory again instead of returning it, with glibc."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        setting = ctypes.CDLL(None).mallopt
        setting(_TRIM_THRESHOLD, KEPT)
        setting(_MMAP_THRESHOLD, LARGEST_BLOCK)


@contextmanager
def trim_malloc(model: AlphaFold) -> Iterator[None]:
    """Trim the heap before each large step of a network inside, on a CPU with glibc."""
    trim, handles = _trim(), []
    if trim is not None and model.single_projection.weight.device.type == "cpu":

        def hook(*_: Any) -> None:
            trim(0)

        handles = [module.register_forward_pre_hook(hook) for module in _large_steps(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _large_steps(model: AlphaFold) -> list[nn.Module]:
    within = [m for m in model.modules() if isinstance(m, (OuterProductMean, TriangleMultiplication))]
    parts = (model.template_embedder, model.extra_msa_stack, model.evoformer, model.structure_module)
    return [*(part for part in parts if part is not None), *within]


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``; None for other C libraries."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError on Windows
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return found
    return None
