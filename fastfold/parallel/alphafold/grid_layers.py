"""Steps and stacks of the Evoformer on a grid of ranks: pair in blocks, MSA cut along one axis.

Transitions and the MSA's column attention run unchanged. Each class here is a variant of the layer that it derives
from, with the same parameters. Masks are whole, because they are small without channels. Every rank draws the dropout
factors of the whole pair alike and takes its part, so they equal those of a single process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastfold.evoformer.attention import Attention
from fastfold.evoformer.evoformer import TemplatePairStack
from fastfold.evoformer.execution import ExecutionPolicy, columns
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.primitives import LayerNorm, SharedDropout
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.parallel.alphafold.axial_blocks import AxialEvoformerStack, ShardedEvoformerBlock
from fastfold.parallel.alphafold.regather import recomputed
from fastfold.parallel.alphafold.triangle_shard import ShardedTriangleMultiplication
from fastfold.parallel.axial.grid import Grid, contract, contract_columns
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import gather, redistribute_async
from fastfold.parallel.comm.groups import shard_slices
from fastfold.parallel.comm.moves import Box
from fastfold.parallel.sequence_parallel.attention import ring_attention

ATTENTIONS = ("auto", "ring", "reshard")


@dataclass(frozen=True)
class GridLayout:
    """Grid of ranks and its methods."""

    grid: Grid  #: The ranks
    #: Method of triangle sums; see :func:`fastfold.parallel.axial.grid.contract`
    contraction: str = "auto"
    #: ``ring`` sends keys and values round a row or column of ranks and fetches the bias block by block. ``reshard``
    #: cuts the rows again within a row of ranks, so that each is whole, and gathers the bias. ``auto`` takes the
    #: method that sends less.
    attention: str = "auto"

    def rings(self, shape: tuple[int, int, int], heads: int, *, turned: bool) -> bool:
        """Return True if attention within the rows of ``[A, L, c]`` uses a ring.

        ``turned`` is True for rows of the transposed tensor; the shape is that of the whole tensor.
        """
        if self.attention != "auto":
            return self.attention == "ring"
        sent = attention_elements(shape, heads, self.grid.transposed if turned else self.grid)
        return sent["ring"] < sent["reshard"]


def attention_elements(shape: tuple[int, int, int], heads: int, grid: Grid) -> dict[str, float]:
    """Count elements that a rank sends in both passes of attention within rows, by method.

    This is the maximum over ranks: a rank on the diagonal keeps a part of its block of the bias when it is transposed,
    and sends less. The shape is that of the whole tensor ``[A, L, c]``, which is cut over the grid's rows and columns.
    """
    rows, length, channels = shape
    ranks, others = grid.whole.size, grid.columns - 1
    block = rows * length * channels / ranks
    bias = heads * length * length
    # The bias is transposed, fetched, and its gradient summed along the columns of ranks. A ring fetches it twice.
    fetched = bias / grid.columns * (grid.rows - 1) / grid.rows
    turned = 2 * bias / ranks + (3 if grid.rows == grid.columns else 2) * fetched
    masks = others * rows * length / ranks
    return {
        # Keys and values are sent forward, and again backward. Their gradients make one step more.
        "ring": (6 * others + 2 * (others > 0)) * block + turned + masks,
        "reshard": 4 * others / grid.columns * block + 2 * bias * (ranks - 1) / ranks,
    }


def _factors(dropout: SharedDropout, block: Tensor, lengths: tuple[int, int], grid: Grid) -> Tensor | None:
    """Return this rank's part of the dropout factors for the whole of ``block [*, rows, columns, c]``."""
    whole = block.new_empty(()).expand(*block.shape[:-3], *lengths, block.shape[-1])
    factors = dropout(whole)
    if factors is None:
        return None
    shared_rows = dropout.shared_dim == -3
    own = grid.own_columns(lengths[1]) if shared_rows else grid.own_rows(lengths[0])
    return factors.narrow(-2 if shared_rows else -3, own.start, own.stop - own.start)


def _ring(
    norm: LayerNorm,
    attention: Attention,
    block: Tensor,
    mask: Tensor,
    bias: Tensor,
    dropout: Tensor | None,
    grid: Grid,
) -> Tensor:
    """Compute ``block + dropout * attention(norm(block))`` in rows cut over the grid's columns.

    The block is ``[*, rows, columns, c]``, the whole mask ``[*, A, L]``, and the bias this rank's block ``[*, H, rows,
    columns]`` of ``[*, H, L, L]``.
    """
    length = mask.shape[-1]
    split = (attention.heads, -1)
    x = norm(block)
    q, k, v = (layer(x).unflatten(-1, split) for layer in (attention.query, attention.key, attention.value))
    square = grid.rows == grid.columns
    # Queries are cut as this tensor's columns, keys along the column of ranks.
    bias = grid.turn(bias, (length, length), (-2, -1))
    if not square:
        bias = gather(bias, -1, grid.column, grid.row_sizes(length))
    mixed = ring_attention(
        q,
        k,
        v,
        bias,
        grid.take(mask, (-2, -1)),
        group=grid.row,
        sizes=grid.column_sizes(length),
        bias_group=grid.column if square else None,
    ).flatten(-2)
    if attention.gate is not None:
        mixed = mixed * torch.sigmoid(attention.gate(x))
    update = attention.output(mixed)
    return block + (update if dropout is None else update * dropout)


class GridMSARowAttention(MSARowAttention):
    """Attention of this rank's sequences; the pair is cut into blocks, and the bias is gathered."""

    layout: GridLayout

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the updated ``msa [*, s, N, c_m]`` from a block of the pair and ``msa_mask [*, s, N]``.

        ``bias`` is that of the block if it was computed before.
        """
        own = self.bias(pair) if bias is None else bias
        whole = self.layout.grid.gather(own, (msa.shape[-2],) * 2, (-2, -1))
        return super().forward(msa, pair, msa_mask, whole)


class GridTriangleAttention(TriangleAttention):
    """Attention within rows (starting node) or columns (ending node) of the pair, which are cut."""

    layout: GridLayout

    def forward(self, pair: Tensor, pair_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the updated block of the pair under the whole ``pair_mask [*, N, N]``.

        ``bias`` is that of the block if it was computed before.
        """
        length = pair_mask.shape[-1]
        lengths = (length, length)
        turned = not self.starting
        grid = self.layout.grid.transposed if turned else self.layout.grid
        bias = self.bias(pair) if bias is None else bias

        def turn(x: Tensor) -> Tensor:
            return x.transpose(-3, -2) if turned else x

        # The following works on rows; around ending nodes, those of the transposed tensor.
        rows = turn(pair)
        if self.layout.rings((*lengths, pair.shape[-1]), self.attention.heads, turned=turned):
            factors = _factors(self.dropout, pair, lengths, self.layout.grid)
            if turned:
                factors, pair_mask, bias = columns(factors), pair_mask.mT, bias.mT
            return turn(_ring(self.norm, self.attention, rows, pair_mask, bias, factors, grid))
        moved = grid.to_rows_async(rows, length)
        whole = self.layout.grid.gather(bias, lengths, (-2, -1))
        own = grid.row_part(length)
        own_mask = pair_mask[..., own] if turned else pair_mask[..., own, :]
        updated = turn(super().forward(turn(moved.wait()), own_mask, whole))
        return turn(grid.from_rows(updated, rows.shape[-3], length))


class GridOuterProductMean(OuterProductMean):
    """Update of this rank's block of the pair, from all sequences of the residues of its rows and columns.

    Both projections are gathered along the residues: O(S N c / √P).
    """

    layout: GridLayout

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Return the updated block ``pair [*, rows, columns, c_z]``.

        ``msa [*, S, n, c_m]`` has this rank's residues, ``msa_mask [*, S, N]`` is whole.
        """
        grid, length = self.layout.grid, msa_mask.shape[-1]
        left, right = recomputed(self.sides, msa)
        # The right side is sent first: other ranks hold more of it.
        moving = grid.transposed.rows_of_shards_async(right, -2, length)
        left = grid.rows_of_shards_async(left, -2, length).wait()
        left_mask = msa_mask[..., grid.own_rows(length)]
        right_mask = msa_mask[..., grid.own_columns(length)]
        if torch.is_grad_enabled():
            return self.recorded(left, moving.wait(), pair, left_mask, right_mask)
        updates = self.rows([moving.wait()], right_mask)
        return self.in_blocks(updates, lambda rows: left[..., rows, :], pair, left_mask)


class GridTriangleMultiplication(ShardedTriangleMultiplication):
    """Triangle multiplication whose factors and product are cut into blocks."""

    layout: GridLayout

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated block of the pair under the whole ``pair_mask [*, N, N]``."""
        grid, length = self.layout.grid, pair_mask.shape[-1]

        def multiply(left: Tensor, right: Tensor) -> Tensor:
            if self.outgoing:
                return contract(left, right, length, grid, self.layout.contraction)
            # The official program contracts left[k, j] with right[k, i].
            return contract_columns(right, left, length, grid, self.layout.contraction)

        mask, dropout = (grid.take(pair_mask, (-2, -1)), _factors(self.dropout, pair, (length, length), grid))
        return self.multiplied(pair, mask, multiply, grid.whole.size, dropout)


class GridEvoformerBlock(ShardedEvoformerBlock):
    """An Evoformer block on a block of the pair, and on a shard of the MSA as with dynamic axial parallelism."""

    def _update_pair(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        assert self.triangle_attention_starting is not None
        assert self.triangle_attention_ending is not None
        pair = self.triangle_multiplication_outgoing(pair, pair_mask)
        pair = self.triangle_multiplication_incoming(pair, pair_mask)
        pair = self.triangle_attention_starting(pair, pair_mask)
        pair = self.triangle_attention_ending(pair, pair_mask)
        return self.pair_transition(pair)


class GridEvoformerStack(AxialEvoformerStack):
    """Evoformer blocks on blocks of the pair; inputs and results are shards along sequences and rows.

    These are the shards of dynamic axial parallelism, which the rest of the network uses.
    """

    layout: GridLayout

    def _entering(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        return rows_to_blocks(self.layout.grid, pair, pair_mask.shape[-1])

    def _leaving(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        return blocks_to_rows(self.layout.grid, pair, pair_mask.shape[-1])


class GridTemplatePairStack(TemplatePairStack):
    """Template blocks on blocks of the pair; input and result are shards along its rows."""

    layout: GridLayout

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, n, N, c_t]`` under the whole ``pair_mask [*, N, N]``."""
        grid, length = self.layout.grid, pair_mask.shape[-1]
        pair = super().forward(rows_to_blocks(grid, pair, length).wait(), pair_mask)
        return blocks_to_rows(grid, pair, length).wait()


def rows_to_blocks(grid: Grid, pair: Tensor, length: int) -> AsyncResult[Tensor]:
    """Start moving a shard ``[*, n, N, c]`` of the pair along its rows to this rank's block of it."""
    return redistribute_async(pair, (-3, -2), _rows(grid, length), grid.boxes((length, length)), grid.whole)


def blocks_to_rows(grid: Grid, pair: Tensor, length: int) -> AsyncResult[Tensor]:
    """Start moving this rank's block of the pair back to a shard along its rows."""
    return redistribute_async(pair, (-3, -2), grid.boxes((length, length)), _rows(grid, length), grid.whole)


def _rows(grid: Grid, length: int) -> list[Box]:
    return [(part, slice(0, length)) for part in shard_slices(length, grid.whole.size)]
