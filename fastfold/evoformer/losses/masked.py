"""Masked means and cross entropies that the losses share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


def full_precision(tree: Any) -> Any:
    """Return a tree of dicts with half-precision tensors cast to float32, the least precision of a loss."""
    if isinstance(tree, Mapping):
        return {key: full_precision(value) for key, value in tree.items()}
    half = isinstance(tree, Tensor) and tree.dtype in (torch.bfloat16, torch.float16)
    return tree.float() if half else tree


def masked_mean(mask: Tensor, value: Tensor, dims: int, eps: float = 1e-10) -> Tensor:
    """Return the mean of ``value [*, ...]`` over its last ``dims`` axes where ``mask`` is 1.

    The mask broadcasts against the value; ``eps`` is added to the count.
    """
    axes = tuple(range(-dims, 0))
    mask = mask.to(value.dtype).expand_as(value)
    return (mask * value).sum(axes) / (mask.sum(axes) + eps)


class RowPart(Protocol):
    """Rows of a tensor that this process holds, and the means to join all rows; set by parallel layouts."""

    @property
    def own(self) -> slice:
        """Rows that this process holds."""

    def join(self, x: Tensor, dim: int = -2) -> Tensor:
        """Return the whole tensor from every process's part ``x``, which holds its rows along ``dim``."""


def cross_entropy(logits: Tensor, target: Tensor, part: RowPart | None = None) -> Tensor:
    """Return the cross entropy ``[*]`` of ``logits [*, classes]`` with class indices ``target [*]``.

    If ``part`` is given, ``logits`` hold only its rows. Each process computes the errors of its rows, and only the
    errors are joined.
    """
    if part is not None:
        return part.join(cross_entropy(logits, target[..., part.own, :]))
    return -torch.log_softmax(logits, -1).gather(-1, target.long().unsqueeze(-1)).squeeze(-1)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross entropy ``[*]`` of ``logits [*]`` with ``labels [*]`` in [0, 1]."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def within_resolution(resolution: Tensor, config: Any) -> Tensor:
    """Return 1 for structures with ``resolution [*]`` (Å) in the head's range, 0 for others.

    NMR and distillation structures have resolution 0 and are excluded.
    """
    if not config.filter_by_resolution:
        return torch.ones_like(resolution)
    inside = (resolution >= config.min_resolution) & (resolution <= config.max_resolution)
    return inside.to(resolution.dtype)
