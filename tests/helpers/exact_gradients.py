"""Backward passes as on a processor without units for bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastfold.kernels.common.scratch import accumulation_dtype
from fastfold.kernels.ops.attention import op as attention
from fastfold.kernels.ops.gated_attention import eager as gated_attention
from fastfold.kernels.ops.outer_product_mean import eager as outer_product_mean
from fastfold.kernels.ops.pair_bias import op as pair_bias
from fastfold.kernels.ops.transition import op as transition
from fastfold.kernels.ops.triangle_multiplication import eager as triangle_multiplication

_MODULES = (attention, outer_product_mean, pair_bias, transition, triangle_multiplication)


@contextmanager
def exact_gradients() -> Iterator[None]:
    """Let backward passes of bfloat16 data compute in float32, whatever the processor."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _MODULES:
            patch.setattr(module, "gradient_dtype", accumulation_dtype)
        patch.setattr(gated_attention, "backward_dtype", accumulation_dtype)
        yield
