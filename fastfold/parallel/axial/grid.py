"""A grid of ranks for tensors ``[*, A, B, c]``: rows cut over the grid's rows, columns over its columns.

:class:`Grid` holds the rule of the cut (any lengths, any rectangle of ranks, without padding) and the moves between
layouts. :attr:`Grid.transposed` is the grid of the transposed tensor, so a method for rows also serves columns.
Gradients are exact adjoints: after ``backward`` the ranks hold the gradient of the sum of all ranks' losses.

:func:`contract` multiplies matrices that are cut into blocks, one for each channel. There are two ways to the same
result. SUMMA broadcasts panels of the right matrices down the columns and sums panels of the product along the rows:
each rank sends O(N² c / √P). Or the blocks are resharded to whole matrices of some channels, which are multiplied
without communication, and the product is resharded back. This sends O(N² c / P) if there are as many channels as ranks.
On a GPU every multiplied matrix is padded with zeros to multiples of 8 rows and columns, at which cuBLAS is fast;
messages are not padded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from fastfold.errors import ConfigError
from fastfold.parallel.axial.matmul import filled, padded_matmul
from fastfold.parallel.comm.async_ops import AsyncResult, absent, broadcasts, sums
from fastfold.parallel.comm.collectives import (
    all_to_all_async,
    first_order,
    gather,
    gather_async,
    redistribute_async,
)
from fastfold.parallel.comm.groups import Group, shard_sizes, shard_slices
from fastfold.parallel.comm.moves import Box
from fastfold.parallel.mesh import ParallelMesh

CONTRACTIONS = ("auto", "summa", "channels")


@dataclass(frozen=True)
class Grid:
    """Ranks in rows and columns."""

    row: Group  #: The ranks of this rank's row, one for each column
    column: Group  #: The ranks of its column
    whole: Group  #: All of them, row by row (column by column if the grid is transposed)
    is_transposed: bool = False  #: True if rows and columns are exchanged

    @classmethod
    def of(cls, mesh: ParallelMesh) -> Grid:
        """Return the grid of a mesh whose plan has ``dap_mode="grid"``.

        Raises:
            ConfigError: The plan has another mode.
        """
        return cls(mesh.group("dap_row"), mesh.group("dap_column"), mesh.group("dap"))

    @property
    def transposed(self) -> Grid:
        """The same ranks as the grid of transposed tensors."""
        return Grid(self.column, self.row, self.whole, not self.is_transposed)

    @property
    def rows(self) -> int:
        """Number of rows of ranks."""
        return self.column.size

    @property
    def columns(self) -> int:
        """Number of columns of ranks."""
        return self.row.size

    def place(self, rank: int) -> tuple[int, int]:
        """Return row and column of a rank of ``whole``."""
        if self.is_transposed:
            column, row = divmod(rank, self.rows)
            return row, column
        return divmod(rank, self.columns)

    def row_sizes(self, length: int) -> list[int]:
        """Return the lengths of the parts of an axis that is cut over the grid's rows."""
        return shard_sizes(length, self.rows)

    def column_sizes(self, length: int) -> list[int]:
        """Return the lengths of the parts of an axis that is cut over the grid's columns."""
        return shard_sizes(length, self.columns)

    def own_rows(self, length: int) -> slice:
        """Return this rank's part of an axis that is cut over the grid's rows."""
        return self.column.shard(length)

    def own_columns(self, length: int) -> slice:
        """Return this rank's part of an axis that is cut over the grid's columns."""
        return self.row.shard(length)

    def take(self, x: Tensor, dims: tuple[int, int] = (-3, -2)) -> Tensor:
        """Return this rank's block of a whole tensor, cut along ``dims`` over the grid's rows and columns; a view."""
        rows, columns = self.own_rows(x.shape[dims[0]]), self.own_columns(x.shape[dims[1]])
        x = x.narrow(dims[0], rows.start, rows.stop - rows.start)
        return x.narrow(dims[1], columns.start, columns.stop - columns.start)

    def gather(self, x: Tensor, lengths: tuple[int, int], dims: tuple[int, int] = (-3, -2)) -> Tensor:
        """Join all blocks on every rank, as the inverse of :meth:`take`. The gradient is reduce-scattered.

        ``x`` is this rank's block, ``lengths`` are those of the whole tensor in the dimensions of :meth:`take`.
        """
        x = gather(x, dims[1], self.row, self.column_sizes(lengths[1]))
        return gather(x, dims[0], self.column, self.row_sizes(lengths[0]))

    def boxes(self, lengths: tuple[int, int]) -> list[Box]:
        """Return the block of each rank of ``whole``: its part of the rows and of the columns."""
        rows, columns = shard_slices(lengths[0], self.rows), shard_slices(lengths[1], self.columns)
        places = (self.place(rank) for rank in range(self.whole.size))
        return [(rows[row], columns[column]) for row, column in places]

    def turn(self, x: Tensor, lengths: tuple[int, int], dims: tuple[int, int] = (-3, -2)) -> Tensor:
        """Cut the first dimension over the grid's columns and the second over its rows.

        The tensor is not transposed: on a square grid, ranks opposite each other exchange their blocks. Arguments as of
        :meth:`gather`.
        """
        target = [(rows, columns) for columns, rows in self.boxes((lengths[1], lengths[0]))]
        return redistribute_async(x, dims, self.boxes(lengths), target, self.whole).wait()

    def to_channels(self, x: Tensor, lengths: tuple[int, int]) -> Tensor:
        """Move blocks ``[*, c, A, B]`` to whole matrices of this rank's share of the channels."""
        return self._channels(x, lengths, x.shape[-3], back=False)

    def from_channels(self, x: Tensor, lengths: tuple[int, int], channels: int) -> Tensor:
        """Move whole matrices of this rank's share of the ``channels`` to blocks ``[*, c, A, B]``."""
        return self._channels(x, lengths, channels, back=True)

    def _channels(self, x: Tensor, lengths: tuple[int, int], channels: int, *, back: bool) -> Tensor:
        everything = slice(0, channels)
        blocks: list[Box] = [(everything, *box) for box in self.boxes(lengths)]
        matrices: list[Box] = [
            (part, slice(0, lengths[0]), slice(0, lengths[1]))
            for part in shard_slices(channels, self.whole.size)
        ]
        source, target = (matrices, blocks) if back else (blocks, matrices)
        return redistribute_async(x, (-3, -2, -1), source, target, self.whole).wait()

    def to_rows_async(self, x: Tensor, columns: int) -> AsyncResult[Tensor]:
        """Start joining the columns of ``[*, A, B, c]``, and cutting the grid row's rows over its ranks.

        ``columns`` is the length of the whole axis of the columns.
        """
        return all_to_all_async(x, -3, -2, self.row, concat_sizes=self.column_sizes(columns))

    def from_rows(self, x: Tensor, own_rows: int, columns: int) -> Tensor:
        """Undo :meth:`to_rows_async`, for a block of ``own_rows`` rows."""
        parts = shard_sizes(own_rows, self.row.size)
        return all_to_all_async(
            x, -2, -3, self.row, split_sizes=self.column_sizes(columns), concat_sizes=parts
        ).wait()

    def row_part(self, length: int) -> slice:
        """Return this rank's part of all rows, an axis of ``length``, after :meth:`to_rows_async`."""
        return self.row_parts(length)[self.whole.rank]

    def row_parts(self, length: int) -> list[slice]:
        """Return the part of all rows of each rank of ``whole`` after :meth:`to_rows_async`.

        The parts cover each row once.
        """
        parts = []
        blocks = shard_slices(length, self.rows)
        for row, column in (self.place(rank) for rank in range(self.whole.size)):
            block = blocks[row]
            part = shard_slices(block.stop - block.start, self.columns)[column]
            parts.append(slice(block.start + part.start, block.start + part.stop))
        return parts

    def rows_of_shards_async(self, x: Tensor, dim: int, length: int) -> AsyncResult[Tensor]:
        """Start giving every rank its grid row's part of an axis of ``length``.

        ``x`` is cut along ``dim``, counted from the end, into consecutive shards over ``whole``.
        """
        shards: list[Box] = [(part,) for part in shard_slices(length, self.whole.size)]
        parts: list[Box] = [(part,) for part in self.row_parts(length)]
        moved = redistribute_async(x, (dim,), shards, parts, self.whole).wait()
        own = self.own_rows(length)
        return gather_async(moved, dim, self.row, shard_sizes(own.stop - own.start, self.columns))


class _Panels(NamedTuple):
    """Pieces of an axis, as cut over the rows or the columns of ranks too."""

    sizes: list[int]
    owners: list[int]  #: Row or column with each piece
    starts: list[int]  #: Offset in the part of its owner

    def broadcast(self, x: Tensor, dim: int, group: Group) -> Iterator[Tensor]:
        """Yield all pieces along ``dim`` of tensors that are cut over a group."""

        def piece(number: int) -> Tensor:
            if self.owners[number] == group.rank:
                return x.narrow(dim, self.starts[number], self.sizes[number])
            shape = list(x.shape)
            shape[dim] = self.sizes[number]
            return absent(x, *shape)

        return broadcasts(piece, self.owners, group)


def _panels(length: int, grid: Grid) -> tuple[_Panels, _Panels]:
    """Return the common refinement of an axis cut over the grid's rows and over its columns, for either."""
    cuts = [[0, *accumulate(sizes)] for sizes in (grid.row_sizes(length), grid.column_sizes(length))]
    edges = sorted({*cuts[0], *cuts[1]})
    sizes = [stop - start for start, stop in pairwise(edges)]
    panels = []
    for cut in cuts:
        # The last part that begins at or before an edge: those before it are empty.
        owners = [bisect_right(cut[:-1], start) - 1 for start in edges[:-1]]
        starts = [start - cut[owner] for start, owner in zip(edges, owners, strict=False)]
        panels.append(_Panels(sizes, owners, starts))
    return panels[0], panels[1]


class _Summa(Function):
    """Product ``left rightᵀ`` of every channel; blocks ``[*, c, rows, columns]`` in the dtype of the operands."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, length: int, grid: Grid) -> Tensor:
        wide = filled(left)
        ctx.save_for_backward(wide, right)
        ctx.panels, ctx.grid, ctx.rows = _panels(length, grid), grid, left.shape[-2]
        of_rows, of_columns = ctx.panels
        columns = grid.column_sizes(length)[grid.row.rank]
        # Rows of the right matrices, down the columns of ranks.
        arriving = of_rows.broadcast(right, -2, grid.column)
        terms = ((wide @ filled(panel).mT)[..., : ctx.rows, : panel.shape[-2]] for panel in arriving)
        summed = sums(terms, of_columns.owners, grid.row)
        return torch.cat(summed, -1) if summed else left.new_zeros(*left.shape[:-1], columns)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        wide, right = ctx.saved_tensors
        grid: Grid = ctx.grid
        of_rows, of_columns = ctx.panels
        # Half precision would round after every panel.
        grad_left = torch.zeros_like(wide, dtype=torch.promote_types(wide.dtype, torch.float32))

        def terms() -> Iterator[Tensor]:
            pieces = of_columns.broadcast(gradient, -1, grid.row)
            for piece, panel in zip(pieces, of_rows.broadcast(right, -2, grid.column), strict=True):
                of_product = filled(piece)
                grad_left.add_(of_product @ filled(panel))
                yield (of_product.mT @ wide)[..., : panel.shape[-2], : panel.shape[-1]]

        summed = sums(terms(), of_rows.owners, grid.column)
        grad_right = torch.cat(summed, -2) if summed else torch.zeros_like(right)
        return grad_left.to(wide.dtype)[..., : ctx.rows, : right.shape[-1]], grad_right, None, None


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
