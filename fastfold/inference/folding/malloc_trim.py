"""Return freed memory to the system while a network folds on a CPU.

The C library (glibc) keeps freed blocks of up to 32 MiB. The next step of a fold allocates larger ones in addition, so
the heap is trimmed before the steps that need the most memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication


@contextmanager
def trim_malloc(model: AlphaFold) -> Iterator[None]:
    """Trim the heap before each large step of a network inside, on a CPU with glibc."""
    trim = _trim()
    handles = []
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
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # TypeError on Windows
        return None
    return found
