"""Masked means and cross entropies that the losses share, also of logits that never exist whole.

Three tensors of logits of residue pairs would take as much memory as a pair representation in float32. In blocks of
rows that the backward pass recomputes, only one block exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from ml_collections import ConfigDict
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fastfold.evoformer.execution import LazyRows
from fastfold.utils.device import reads_are_free


def full_precision(tree: Any) -> Any:
    """Return a tree of dicts with half-precision tensors cast to float32, the least precision of a loss."""
    if isinstance(tree, Mapping):
        return {key: full_precision(value) for key, value in tree.items()}
    half = isinstance(tree, Tensor) and tree.dtype in (torch.bfloat16, torch.float16)
    return tree.float() if half else tree


# Masks of the labels that enter an error as numbers: zero times NaN is NaN, in the error and in its gradient.
_MASKS = {
    "all_atom_positions": "all_atom_mask",
    "atom14_gt_positions": "atom14_gt_exists",
    "atom14_alt_gt_positions": "atom14_alt_gt_exists",
    "backbone_affine_tensor": "backbone_affine_mask",
    "chi_angles": "chi_mask",
    "pseudo_beta": "pseudo_beta_mask",
    "rigidgroups_gt_frames": "rigidgroups_gt_exists",
    "rigidgroups_alt_gt_frames": "rigidgroups_gt_exists",
}


def without_masked(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a batch in a precision, with zeros for masked labels, which may hold any value, also NaN.

    Boolean masks become numbers.
    """
    filled = {
        name: x.to(dtype) if x.is_floating_point() or x.dtype == torch.bool else x
        for name, x in batch.items()
    }
    for name in _MASKS.keys() & batch.keys():
        label, hidden = filled[name], filled[_MASKS[name]] == 0
        filled[name] = label.masked_fill(hidden[(...,) + (None,) * (label.dim() - hidden.dim())], 0.0)
    return filled


def masked_mean(mask: Tensor, value: Tensor, dims: int, eps: float = 1e-10) -> Tensor:
    """Return the mean of ``value [*, ...]`` over its last ``dims`` axes where ``mask`` is 1.

    The mask broadcasts against the value; ``eps`` is added to the count.
    """
    axes = tuple(range(-dims, 0))
    mask = mask.to(value.dtype).expand_as(value)
    return (mask * value).sum(axes) / (mask.sum(axes) + eps)


def used_indices(mask: Tensor) -> Tensor | slice:
    """Return the indices that are set in any sample of a mask ``[*, F]``.

    On a GPU all indices are returned, because the host would have to wait for the number of the others.
    """
    if not reads_are_free(mask.device):
        return slice(None)
    return mask.reshape(-1, mask.shape[-1]).amax(0).nonzero().squeeze(-1)


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


def within_resolution(resolution: Tensor, config: ConfigDict) -> Tensor:
    """Return 1 for structures with ``resolution [*]`` (Å) in the head's range, 0 for others.

    NMR and distillation structures have resolution 0 and are excluded.
    """
    if not config.filter_by_resolution:
        return torch.ones_like(resolution)
    inside = (resolution >= config.min_resolution) & (resolution <= config.max_resolution)
    return inside.to(resolution.dtype)


@dataclass(frozen=True)
class PairLogits:
    """Logits ``[N, N, bins]`` by rows."""

    logits: Tensor | LazyRows  #: This process's rows ``[n, N, bins]``, whole or computed on demand
    rows: RowPart | None = None  #: Rows of this process among all; None if it has all
    #: Indices ``[N]`` of the residues in the wanted order; None for the order of the logits
    order: Tensor | None = None

    def reduce(self, function: Callable[..., Tensor], *pairs: Tensor) -> Tensor:
        """Reduce the logits over their bins; see :func:`over_bins`."""
        if self.order is not None:
            back = torch.argsort(self.order)
            pairs = tuple(x[back][:, back] for x in pairs)
        reduced = self._of_rows(function, pairs, -2)
        return reduced if self.order is None else reduced[self.order][:, self.order]

    def whole(self) -> Tensor:
        """Return all logits ``[N, N, bins]``."""
        logits = self._of_rows(_same, (), -3)
        return logits if self.order is None else logits[self.order][:, self.order]

    def at(self, columns: Tensor) -> Tensor:
        """Return the logits of some columns of each row; see :func:`at_columns`."""
        if self.order is not None:
            columns = self.order[columns[torch.argsort(self.order)]]
        rows = self._of_rows(_columns, (columns,), -3)
        return rows if self.order is None else rows[self.order]

    def _of_rows(self, function: Callable[..., Tensor], rows: tuple[Tensor, ...], dim: int) -> Tensor:
        """Return a function of all rows of the logits and of other tensors, joined along the axis of the rows."""
        if self.rows is not None:
            own = self.rows.own
            rows = tuple(x[own] for x in rows)
        logits = self.logits
        if isinstance(logits, Tensor):
            values = function(logits, *rows)
        else:
            blocks = []
            for index in logits.slices():
                of_block = partial(_of_block, function, logits, index)
                inputs = tuple(x[index] for x in rows)
                recorded = torch.is_grad_enabled()
                blocks.append(
                    checkpoint(of_block, *inputs, use_reentrant=False) if recorded else of_block(*inputs)
                )
            values = torch.cat(blocks)
        return values if self.rows is None else self.rows.join(values, dim)


def _of_block(function: Callable[..., Tensor], logits: LazyRows, index: slice, *rows: Tensor) -> Tensor:
    return function(logits.rows(index), *rows)


def _same(logits: Tensor) -> Tensor:
    return logits


def _columns(logits: Tensor, columns: Tensor) -> Tensor:
    return logits.gather(-2, columns[..., None].expand(*columns.shape, logits.shape[-1]))


def at_columns(logits: Tensor | PairLogits, columns: Tensor) -> Tensor:
    """Return the logits ``[N, K, bins]`` of some columns of each row.

    The ``logits [N, N, bins]`` are a tensor or in rows, the ``columns [N, K]`` int64 numbers.
    """
    return _columns(logits, columns) if isinstance(logits, Tensor) else logits.at(columns)


def over_bins(function: Callable[..., Tensor], logits: Tensor | PairLogits, *pairs: Tensor) -> Tensor:
    """Reduce ``logits [N, N, bins]`` of residue pairs, a tensor or in rows, over their bins to ``[N, N]``.

    The function returns ``[rows, N]`` of logits ``[rows, N, bins]`` and the same rows of ``pairs``, tensors ``[N, N]``
    without gradients; each pair from its own numbers alone.
    """
    return function(logits, *pairs) if isinstance(logits, Tensor) else logits.reduce(function, *pairs)


def pair_logits(head: dict[str, Any], order: Tensor | None = None) -> Tensor | PairLogits:
    """Return the logits of a head's result in an order of residues."""
    logits, rows = head["logits"], head.get("rows")
    if isinstance(logits, Tensor) and rows is None:
        return logits if order is None else logits[order][:, order]
    return PairLogits(logits, rows, order)
