"""Logits of residue pairs that losses reduce over the bins, also where they never exist whole.

Three of them would take as much memory as a pair representation in float32. In blocks of rows that the backward pass
recomputes, only one block exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastfold.evoformer.execution import LazyRows
from fastfold.evoformer.losses.masked import RowPart


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
        found = self._of_rows(function, pairs, -2)
        return found if self.order is None else found[self.order][:, self.order]

    def at(self, columns: Tensor) -> Tensor:
        """Return the logits of some columns of each row; see :func:`at_columns`."""
        if self.order is not None:
            columns = self.order[columns[torch.argsort(self.order)]]
        found = self._of_rows(_columns, (columns,), -3)
        return found if self.order is None else found[self.order]

    def _of_rows(self, function: Callable[..., Tensor], rows: tuple[Tensor, ...], dim: int) -> Tensor:
        """Return a function of all rows of the logits and of other tensors, joined along the axis of the rows."""
        if self.rows is not None:
            own = self.rows.own
            rows = tuple(x[own] for x in rows)
        logits = self.logits
        if isinstance(logits, Tensor):
            found = function(logits, *rows)
        else:
            blocks = []
            for index in logits.slices():
                of_block = partial(_of_block, function, logits, index)
                given = tuple(x[index] for x in rows)
                recorded = torch.is_grad_enabled()
                blocks.append(
                    checkpoint(of_block, *given, use_reentrant=False) if recorded else of_block(*given)
                )
            found = torch.cat(blocks)
        return found if self.rows is None else self.rows.join(found, dim)


def _of_block(function: Callable[..., Tensor], logits: LazyRows, index: slice, *rows: Tensor) -> Tensor:
    return function(logits.rows(index), *rows)


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
