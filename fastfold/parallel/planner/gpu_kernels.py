"""Operators of a model as a GPU runs them, while it is traced on fake tensors of the CPU.

On a CPU, PyTorch takes two of its functions apart that are one kernel on a GPU: dropout, and fused attention with
dropout, whose scores then appear as whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Replace functions of ``torch.nn.functional`` that a GPU fuses, inside the block.

    Results inside are not those of the model; only shapes, dtypes and operators are.
    """
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return dropout(input, p, training, inplace)
        result: Tensor = torch.native_dropout(input, p, True)[0]
        return result

    def fused_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **settings: Any,
    ) -> Tensor:
        # Dropout of a fused attention is drawn in registers.
        return attention(query, key, value, attn_mask, 0.0, is_causal, **settings)

    F.dropout = fused_dropout
    F.scaled_dot_product_attention = fused_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention
