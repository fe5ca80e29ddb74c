"""Gradients as the backward operators return them: a list with an entry for every input, empty where unneeded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def wanted_gradients(
    grads: Sequence[Tensor | None], inputs: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients in the dtypes of their inputs, and empty tensors in place of those that nobody needs.

    Args:
        grads: In any floating dtype; None only where not needed.
        inputs: What they are gradients of.
        needs: Which of them are needed.
    """
    return [
        x.new_empty(0) if g is None or not need else g.to(x.dtype)
        for g, x, need in zip(grads, inputs, needs, strict=True)
    ]


def unwritten_gradients(inputs: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """What :func:`wanted_gradients` returns, by shapes alone."""
    return [torch.empty_like(x) if need else x.new_empty(0) for x, need in zip(inputs, needs, strict=True)]
