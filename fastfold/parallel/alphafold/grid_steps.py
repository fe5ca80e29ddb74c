"""Steps of the Evoformer on a grid of ranks: pair in blocks of residues, MSA in blocks of sequences and residues.

Transitions act on positions alone and run unchanged. Each class here is a form of the layer that it derives from, with
the same parameters; representations are blocks, masks are whole, because they have no channels. Dropout factors are
drawn whole, alike on every rank, and each takes its part, so that they are those of a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastfold.evoformer.attention import Attention, columns
from fastfold.evoformer.dropout import SharedDropout
from fastfold.evoformer.msa_attention import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.primitives import LayerNorm
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.parallel.alphafold.triangle_shard import ShardedTriangleMultiplication
from fastfold.parallel.collectives import gather, gather_async
from fastfold.parallel.grid import Grid
from fastfold.parallel.grid_product import contract, contract_columns
from fastfold.parallel.sequence_parallel import ring_attention

ATTENTIONS = ("auto", "ring", "switch")


@dataclass(frozen=True)
class GridLayout:
    """Where blocks lie and how they are worked with.

    Attributes:
        grid: The ranks.
        contraction: How triangles are summed; see :func:`fastfold.parallel.grid_product.contract`.
        attention: ``ring`` (keys and values go round a row or column of ranks, the bias is fetched block by block),
            ``switch`` (a row of ranks cuts its rows once more and has them whole, the bias is gathered), or ``auto``
            for the one that sends less.
    """

    grid: Grid
    contraction: str = "auto"
    attention: str = "auto"

    def rings(self, shape: tuple[int, int, int], heads: int, *, turned: bool) -> bool:
        """Whether attention within the rows of ``[A, L, c]`` (of the transposed, if ``turned``) goes round a ring.

        Args:
            shape: Of the whole tensor.
            heads: Heads of the bias; 0 if there is none.
            turned: Whether rows are those of the transposed tensor.
        """
        if self.attention != "auto":
            return self.attention == "ring"
        sent = attention_elements(shape, heads, self.grid.turned if turned else self.grid)
        return sent["ring"] < sent["switch"]


def attention_elements(shape: tuple[int, int, int], heads: int, grid: Grid) -> dict[str, float]:
    """Elements that a rank sends in both passes of attention within the rows of ``[A, L, c]``, by the way it is done.

    That of a rank that keeps nothing of its block of the bias when it is turned, as those on a diagonal do.

    Args:
        shape: Of the whole tensor, cut over the grid's rows and columns.
        heads: Heads of the bias; 0 if there is none.
        grid: The ranks.
    """
    rows, length, channels = shape
    ranks, others = grid.whole.size, grid.columns - 1
    block = rows * length * channels / ranks
    bias = heads * length * length
    # The bias is turned, and fetched and its gradient summed down the columns; block by block it is fetched twice.
    fetched = bias / grid.columns * (grid.rows - 1) / grid.rows
    turned = 2 * bias / ranks + (3 if grid.rows == grid.columns else 2) * fetched
    masks = others * rows * length / ranks
    return {
        # Keys and values forward, and again backward, where their gradients go one step further.
        "ring": (6 * others + 2 * (others > 0)) * block + turned + masks,
        "switch": 4 * others / grid.columns * block + 2 * bias * (ranks - 1) / ranks,
    }


def _factors(dropout: SharedDropout, block: Tensor, lengths: tuple[int, int], grid: Grid) -> Tensor | None:
    """This rank's part of the dropout factors for the whole of ``block [*, rows, columns, c]``."""
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
    bias: Tensor | None,
    dropout: Tensor | None,
    grid: Grid,
) -> Tensor:
    """``block + dropout * attention(norm(block))`` within rows that are cut over the grid's columns.

    Args:
        norm: Layer norm of the branch.
        attention: Its attention.
        block: ``[*, rows, columns, c]``.
        mask: ``[*, A, L]``, whole.
        bias: This rank's block ``[*, H, rows, columns]`` of ``[*, H, L, L]``, or None.
        dropout: Factors for the block, or None.
        grid: The ranks.
    """
    length = mask.shape[-1]
    split = (attention.heads, -1)
    x = norm(block)
    q, k, v = (layer(x).unflatten(-1, split) for layer in (attention.query, attention.key, attention.value))
    square = grid.rows == grid.columns
    if bias is not None:
        # Queries cut as this tensor's columns are, keys down the column of ranks.
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
        bias_group=grid.column if square and bias is not None else None,
    ).flatten(-2)
    if attention.gate is not None:
        mixed = mixed * torch.sigmoid(attention.gate(x))
    update = attention.output(mixed)
    return block + (update if dropout is None else update * dropout)


class GridMSARowAttention(MSARowAttention):
    """Attention within sequences that are cut over the grid's columns."""

    layout: GridLayout

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Updated block of ``msa`` from its and the pair's block, or that of the bias, and the whole ``msa_mask``."""
        grid = self.layout.grid
        sequences, length = msa_mask.shape[-2:]
        bias = self.bias(pair) if bias is None else bias
        if self.layout.rings((sequences, length, msa.shape[-1]), self.attention.heads, turned=False):
            factors = _factors(self.dropout, msa, (sequences, length), grid)
            return _ring(self.norm, self.attention, msa, msa_mask, bias, factors, grid)
        rows = grid.to_rows_async(msa, length)
        whole = grid.gather(bias, (length, length), (-2, -1))
        updated = super().forward(rows.wait(), pair, msa_mask[..., grid.row_part(sequences), :], whole)
        return grid.from_rows(updated, msa.shape[-3], length)


class GridTriangleAttention(TriangleAttention):
    """Attention within rows (starting node) or columns (ending node) of the pair, which are cut."""

    layout: GridLayout

    def forward(self, pair: Tensor, pair_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Updated block of the pair under the whole ``pair_mask [*, N, N]``; ``bias`` is that of the block."""
        length = pair_mask.shape[-1]
        lengths = (length, length)
        turned = not self.starting
        grid = self.layout.grid.turned if turned else self.layout.grid
        bias = self.bias(pair) if bias is None else bias
        # From here on rows: of the transposed tensor around ending nodes.
        rows = pair.transpose(-3, -2) if turned else pair
        if self.layout.rings((*lengths, pair.shape[-1]), self.attention.heads, turned=turned):
            factors = _factors(self.dropout, pair, lengths, self.layout.grid)
            if turned:
                factors, pair_mask, bias = columns(factors), pair_mask.mT, bias.mT
            updated = _ring(self.norm, self.attention, rows, pair_mask, bias, factors, grid)
            return updated.transpose(-3, -2) if turned else updated
        moved = grid.to_rows_async(rows, length)
        whole = self.layout.grid.gather(bias, lengths, (-2, -1))
        own = grid.row_part(length)
        if turned:
            updated = super().forward(moved.wait().transpose(-3, -2), pair_mask[..., own], whole)
            updated = updated.transpose(-3, -2)
        else:
            updated = super().forward(moved.wait(), pair_mask[..., own, :], whole)
        updated = grid.from_rows(updated, rows.shape[-3], length)
        return updated.transpose(-3, -2) if turned else updated


def _on_whole_columns(
    step: Callable[[Tensor, Tensor], Tensor], msa: Tensor, msa_mask: Tensor, layout: GridLayout
) -> Tensor:
    """A step along columns of the MSA, which a column of ranks cuts once more and has whole."""
    grid = layout.grid.turned
    sequences, length = msa_mask.shape[-2:]
    moved = grid.to_rows_async(msa.transpose(-3, -2), sequences).wait().transpose(-3, -2)
    mask = msa_mask[..., grid.row_part(length)]
    updated = step(moved, mask)
    return grid.from_rows(updated.transpose(-3, -2), msa.shape[-2], sequences).transpose(-3, -2)


class GridMSAColumnAttention(MSAColumnAttention):
    """Attention within residues' columns of the MSA, which are cut over the grid's rows."""

    layout: GridLayout

    def forward(self, msa: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated block of ``msa`` under the whole ``msa_mask [*, S, N]``."""
        sequences, length = msa_mask.shape[-2:]
        if not self.layout.rings((length, sequences, msa.shape[-1]), 0, turned=True):
            return _on_whole_columns(super().forward, msa, msa_mask, self.layout)
        grid = self.layout.grid
        factors = columns(_factors(self.dropout, msa, (sequences, length), grid))
        rows = msa.transpose(-3, -2)
        updated = _ring(self.norm, self.attention, rows, msa_mask.mT, None, factors, grid.turned)
        return updated.transpose(-3, -2)


class GridMSAColumnGlobalAttention(MSAColumnGlobalAttention):
    """Global attention within residues' columns of the extra MSA, which are always switched to be whole.

    Its one query for each column leaves nothing for a ring to do beside sending.
    """

    layout: GridLayout

    def forward(self, msa: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated block of ``msa`` under the whole ``msa_mask [*, S, N]``."""
        return _on_whole_columns(super().forward, msa, msa_mask, self.layout)


class GridOuterProductMean(OuterProductMean):
    """Update of this rank's block of the pair, from all sequences of its rows' and its columns' residues.

    Both projections are gathered along the sequences: O(S N c / √P).
    """

    layout: GridLayout

    def sides(self, msa: Tensor, msa_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``left [*, S, rows, c]``, ``right [*, S, columns, c]`` and their masks, from a block and the whole mask."""
        grid = self.layout.grid
        sequences, length = msa_mask.shape[-2:]
        x = self.norm(msa)
        # The right side first: it travels while the left one is turned.
        right = gather_async(self.right(x), -3, grid.column, grid.row_sizes(sequences))
        # Sequences over the grid's columns and residues over its rows, so that a row of ranks has its rows' residues.
        left = grid.turn(self.left(x), (sequences, length))
        left = gather(left, -3, grid.row, grid.column_sizes(sequences))
        left_mask, right_mask = (
            msa_mask[..., grid.own_rows(length)],
            msa_mask[..., grid.own_columns(length)],
        )
        return left, right.wait(), left_mask, right_mask


class GridTriangleMultiplication(ShardedTriangleMultiplication):
    """Triangle multiplication whose factors and product lie in blocks."""

    layout: GridLayout

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Updated block of the pair under the whole ``pair_mask [*, N, N]``."""
        grid, length = self.layout.grid, pair_mask.shape[-1]

        def multiply(left: Tensor, right: Tensor) -> Tensor:
            if self.outgoing:
                return contract(left, right, length, grid, self.layout.contraction)
            # The official program contracts left[k, j] with right[k, i].
            return contract_columns(right, left, length, grid, self.layout.contraction)

        product = self.product(pair, grid.take(pair_mask, (-2, -1)), multiply, grid.whole.size)
        return self.updated(pair, product, _factors(self.dropout, pair, (length, length), grid))
