"""Products of matrices, one for each channel, that are cut into blocks on a grid of ranks.

There are two ways to the same result. SUMMA broadcasts panels of the right matrices down the columns and sums panels
of the product along the rows: each rank sends O(N² c / √P). Or the blocks are resharded to whole matrices of some
channels, which are multiplied without communication, and the product is resharded back. This sends O(N² c / P) if
there are as many channels as ranks.

On a GPU every multiplied matrix is padded with zeros to multiples of 8 rows and columns, at which cuBLAS is fast;
messages are not padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastfold.errors import ConfigError
from fastfold.parallel.axial.grid import Grid
from fastfold.parallel.axial.matmul import filled, padded_matmul
from fastfold.parallel.comm.differentiable import first_order
from fastfold.parallel.comm.groups import shard_sizes
from fastfold.parallel.comm.pipelined import absent, broadcasts, sums

CONTRACTIONS = ("auto", "summa", "channels")


@dataclass(frozen=True)
class _Panel:
    """A piece of an axis in one row of ranks (of the right matrices) and in one column (of the product).

    Its starts are offsets in the parts of the row and the column.
    """

    size: int
    row: int
    row_start: int
    column: int
    column_start: int


def _panels(length: int, grid: Grid) -> list[_Panel]:
    """Return the common refinement of an axis cut over the grid's rows and over its columns."""
    rows = [0, *accumulate(grid.row_sizes(length))]
    columns = [0, *accumulate(grid.column_sizes(length))]
    edges = sorted({*rows, *columns})
    found = []
    for start, stop in pairwise(edges):
        # The last part that begins here: those before it are empty.
        row = max(r for r in range(grid.rows) if rows[r] <= start)
        column = max(c for c in range(grid.columns) if columns[c] <= start)
        found.append(_Panel(stop - start, row, start - rows[row], column, start - columns[column]))
    return found


class _Summa(Function):
    """Product ``left rightᵀ`` of every channel; blocks ``[*, c, rows, columns]`` in the dtype of the operands."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, length: int, grid: Grid) -> Tensor:
        wide = filled(left)
        ctx.save_for_backward(wide, right)
        ctx.panels, ctx.grid, ctx.rows = _panels(length, grid), grid, left.shape[-2]
        columns = grid.column_sizes(length)[grid.row.rank]
        arriving = _rights(right, ctx.panels, grid)
        terms = ((wide @ filled(panel).mT)[..., : ctx.rows, : panel.shape[-2]] for panel in arriving)
        found = sums(terms, _columns_of(ctx.panels), grid.row)
        return torch.cat(found, -1) if found else left.new_zeros(*left.shape[:-1], columns)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        wide, right = ctx.saved_tensors
        grid: Grid = ctx.grid
        # Half precision would round after every panel.
        grad_left = torch.zeros_like(wide, dtype=torch.promote_types(wide.dtype, torch.float32))

        def terms() -> Iterator[Tensor]:
            pieces = zip(
                _gradients(gradient, ctx.panels, grid), _rights(right, ctx.panels, grid), strict=True
            )
            for piece, panel in pieces:
                of_product = filled(piece)
                grad_left.add_(of_product @ filled(panel))
                yield (of_product.mT @ wide)[..., : panel.shape[-2], : panel.shape[-1]]

        found = sums(terms(), [panel.row for panel in ctx.panels], grid.column)
        grad_right = torch.cat(found, -2) if found else torch.zeros_like(right)
        return grad_left.to(wide.dtype)[..., : ctx.rows, : right.shape[-1]], grad_right, None, None


def _columns_of(panels: Sequence[_Panel]) -> list[int]:
    return [panel.column for panel in panels]


def _rights(right: Tensor, panels: Sequence[_Panel], grid: Grid) -> Iterator[Tensor]:
    """Yield panels of the right matrices' rows, down the columns of ranks: ``[*, c, size, k]``."""

    def piece(number: int) -> Tensor:
        panel = panels[number]
        if panel.row == grid.column.rank:
            return right.narrow(-2, panel.row_start, panel.size)
        return absent(right, *right.shape[:-2], panel.size, right.shape[-1])

    return broadcasts(piece, [panel.row for panel in panels], grid.column)


def _gradients(gradient: Tensor, panels: Sequence[_Panel], grid: Grid) -> Iterator[Tensor]:
    """Yield panels of the product's columns, along the rows of ranks: ``[*, c, rows, size]``."""

    def piece(number: int) -> Tensor:
        panel = panels[number]
        if panel.column == grid.row.rank:
            return gradient.narrow(-1, panel.column_start, panel.size)
        return absent(gradient, *gradient.shape[:-1], panel.size)

    return broadcasts(piece, _columns_of(panels), grid.row)


def elements_sent(length: int, channels: int, grid: Grid) -> dict[str, float]:
    """Count elements that a rank sends in both passes of one contraction of square matrices, by method.

    The count is the mean over the ranks for ``summa``, and the maximum for ``channels``.
    """
    area, ranks = length * length * channels, grid.whole.size
    along, down = (grid.columns - 1) / grid.columns, (grid.rows - 1) / grid.rows
    # Along rows: sum of the product, broadcast of its gradient. Down columns: broadcasts and sum of the right side.
    summa = 2 * along * area / grid.rows + 3 * down * area / grid.columns
    own = length * length * shard_sizes(channels, ranks)[0]
    # To channels: two factors and the product's gradient. Back to blocks: the product and the factors' gradients.
    return {"summa": summa, "channels": 3 * (area - own) / ranks + 3 * own * (ranks - 1) / ranks}


def choose_contraction(way: str, length: int, channels: int, grid: Grid) -> str:
    """Choose a method; ``auto`` takes the one that sends less, or ``summa`` below one channel per rank.

    Raises:
        ConfigError: The method is unknown.
    """
    if way not in CONTRACTIONS:
        raise ConfigError(f"contraction: expected one of {', '.join(CONTRACTIONS)}, found {way!r}")
    if way != "auto":
        return way
    sent = elements_sent(length, channels, grid)
    return "channels" if channels >= grid.whole.size and sent["channels"] < sent["summa"] else "summa"


def contract(left: Tensor, right: Tensor, length: int, grid: Grid, way: str = "auto") -> Tensor:
    """Compute ``out[i, j] = Σ_k left[i, k] right[j, k]`` for every channel (outgoing edges of triangles).

    For incoming edges, ``Σ_k left[k, i] right[k, j]``, see :func:`contract_columns`.

    Each rank has its blocks ``[*, c, rows, columns]`` of matrices ``length`` x ``length``. The way is ``summa``,
    ``channels`` or ``auto`` (:func:`choose_contraction`).

    Returns:
        This rank's block of the product. The backward pass keeps only local blocks (``summa``), or as much in the
        channels' layout.

    Raises:
        ConfigError: The method is unknown.
    """
    if choose_contraction(way, length, left.shape[-3], grid) == "channels":
        lengths = (length, length)
        product = padded_matmul(grid.to_channels(left, lengths), grid.to_channels(right, lengths).mT)
        return grid.from_channels(product, lengths, left.shape[-3])
    result: Tensor = _Summa.apply(left, right, length, grid)
    return result


def contract_columns(left: Tensor, right: Tensor, length: int, grid: Grid, way: str = "auto") -> Tensor:
    """Compute ``out[i, j] = Σ_k left[k, i] right[k, j]`` for every channel; see :func:`contract`."""
    # The transposed product is one along rows of the transposed grid.
    return contract(right.mT, left.mT, length, grid.transposed, way).mT
