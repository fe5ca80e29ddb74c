"""Means under masks and cross entropies: the arithmetic that the losses share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


def full_precision(tree: Any) -> Any:
    """A tree of dicts with tensors of half precision in float32; losses are never taken in less."""
    if isinstance(tree, Mapping):
        return {key: full_precision(value) for key, value in tree.items()}
    half = isinstance(tree, Tensor) and tree.dtype in (torch.bfloat16, torch.float16)
    return tree.float() if half else tree


def masked_mean(mask: Tensor, value: Tensor, dims: int, eps: float = 1e-10) -> Tensor:
    """Mean of ``value`` over its last ``dims`` axes where ``mask`` is 1; the mask broadcasts.

    Args:
        mask: Broadcasts against ``value``.
        value: ``[*, ...]``.
        dims: Number of trailing axes to reduce.
        eps: Added to the count.
    """
    axes = tuple(range(-dims, 0))
    mask = mask.to(value.dtype).expand_as(value)
    return (mask * value).sum(axes) / (mask.sum(axes) + eps)


class RowPart(Protocol):
    """Which rows of something are here, and how to get the others: what a layout adds to its logits."""

    @property
    def own(self) -> slice:
        """The rows that are here."""

    def join(self, x: Tensor, dim: int = -2) -> Tensor:
        """All rows of a tensor of which ``x`` holds these along ``dim``."""


def cross_entropy(logits: Tensor, target: Tensor, part: RowPart | None = None) -> Tensor:
    """Cross entropy ``[*]`` of ``logits [*, classes]`` with class indices ``target [*]``.

    Where ``logits`` are a part of the rows, they are compared where they are, and the errors alone are joined.
    """
    if part is not None:
        return part.join(cross_entropy(logits, target[..., part.own, :]))
    return -torch.log_softmax(logits, -1).gather(-1, target.long().unsqueeze(-1)).squeeze(-1)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy ``[*]`` of ``logits [*]`` with ``labels [*]`` in [0, 1]."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def within_resolution(resolution: Tensor, config: Any) -> Tensor:
    """1 where the structure's ``resolution [*]`` (Å) lies in the head's range, else 0.

    NMR and distillation structures have resolution 0 and are left out.
    """
    if not config.filter_by_resolution:
        return torch.ones_like(resolution)
    inside = (resolution >= config.min_resolution) & (resolution <= config.max_resolution)
    return inside.to(resolution.dtype)
