"""A grid of ranks for tensors ``[*, A, B, c]``: rows cut over the grid's rows, columns over its columns.

:class:`Grid` holds the rule of the cut (any lengths, any rectangle of ranks, without padding) and the moves between
layouts; ``grid_matmul.py`` multiplies matrices that are cut into blocks. :attr:`Grid.transposed` is the grid of the
transposed tensor, so a method for rows also serves columns.

Gradients are exact adjoints: after ``backward`` the ranks hold the gradient of the sum of all ranks' losses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastfold.parallel.comm.async_ops import AsyncResult, Box
from fastfold.parallel.comm.collectives import all_to_all_async, gather, gather_async, redistribute_async
from fastfold.parallel.comm.groups import Group, shard_sizes, shard_slices
from fastfold.parallel.mesh import ParallelMesh


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
        found = []
        blocks = shard_slices(length, self.rows)
        for row, column in (self.place(rank) for rank in range(self.whole.size)):
            block = blocks[row]
            part = shard_slices(block.stop - block.start, self.columns)[column]
            found.append(slice(block.start + part.start, block.start + part.stop))
        return found

    def rows_of_shards_async(self, x: Tensor, dim: int, length: int) -> AsyncResult[Tensor]:
        """Start giving every rank its grid row's part of an axis of ``length``.

        ``x`` is cut along ``dim``, counted from the end, into consecutive shards over ``whole``.
        """
        shards: list[Box] = [(part,) for part in self.whole_slices(length)]
        parts: list[Box] = [(part,) for part in self.row_parts(length)]
        moved = redistribute_async(x, (dim,), shards, parts, self.whole).wait()
        own = self.own_rows(length)
        return gather_async(moved, dim, self.row, shard_sizes(own.stop - own.start, self.columns))

    def whole_slices(self, length: int) -> list[slice]:
        """Return the shards of an axis that is cut over all ranks."""
        return shard_slices(length, self.whole.size)
