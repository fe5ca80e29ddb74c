"""An Evoformer block on shards where gradients are recorded: as few messages as its dependencies allow.

What leaves at one time leaves in one message: a bias with the pair that is resharded, the outer product's projection
with the MSA, both factors of a triangle product. Only what is big, and not needed before something else is computed,
leaves in a message of its own. Triangle products are made in one of three ways:

- ``sums``: the terms of each are summed in one message, and the pair is cut along its rows from the first product to
  attention around ending nodes. The fewest messages: on the GPUs of one machine, where the terms are not too big.
- ``channels``: factors and product are resharded, which any cut of the pair serves; it is cut along its rows from the
  outer product on.
- ``terms``: the terms are summed block by block of channels, and the pair changes its cut between the products.

Beside a message is computed what does not wait for it: queries, keys and values beside the bias, one projection of the
outer product beside the other; in the backward pass what the operators behind the message compute again of their
inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastfold.evoformer.execution import columns
from fastfold.evoformer.msa_attention import MSAColumnAttention
from fastfold.parallel.alphafold.regather import (
    Again,
    Regathered,
    RegatheringLayer,
    attention_regathered,
    begin_attention,
    begins_backward,
)
from fastfold.parallel.axial.matmul import block_channels, choose_contraction
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import exchange_async
from fastfold.parallel.comm.moves import Move

Moving = tuple[Tensor, Move]
Arriving = Callable[[], tuple[Tensor, ...]]

SMALL_MESSAGE = 2**22
"""Bytes under which a tensor leaves with another one, and is waited for, rather than in a message of its own."""

MAX_EXTRA_BYTES = 24 * 2**20
"""What a rank may send more to spare a message: so much passes a link of 360 GB/s while a message sets out and the five
kernels around it are launched (70 µs by the constants of ``planner/calibration.json``)."""

MAX_SUMMING_RANKS = 8
"""Ranks that such a link joins: the GPUs of a machine."""


class TrainingBlock:
    """One pass of a block.

    Args:
        block: An :class:`~fastfold.parallel.alphafold.axial_blocks.AxialEvoformerBlock`.
        msa_mask: ``[*, S, N]``, whole.
        pair_mask: ``[*, N, N]``, whole.
    """

    def __init__(self, block: Any, msa_mask: Tensor, pair_mask: Tensor) -> None:
        self._block, self._msa_mask, self._pair_mask = block, msa_mask, pair_mask
        self._shards: AxialShards = block.shards
        self._residues = pair_mask.shape[-1]
        self._regathered = Regathered(self._shards.group)
        self._way = ""

    def __call__(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Updated shards, cut as they came: see :class:`~.axial_blocks.ShardedEvoformerBlock`."""
        channels = len(self._block.triangle_multiplication_outgoing.projection.weight) // 2
        self._way = product_way(
            self._residues, channels, pair.shape[:-3].numel(), pair.element_size(), self._shards.group.size
        )
        update = self._outer_product_first if self._block.outer_product_first else self._outer_product_last
        msa, pair = update(msa, pair)
        return msa, self._regathered.started_by(pair)

    def _outer_product_last(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        attention = self._block.msa_row_attention
        move, again = self._gathering(attention, attention.bias(pair), -1, attention.regathers(pair))
        arriving, moving = self._start_beside([move], self._to_rows(pair))
        begun = begin_attention(attention.norm, attention.attention, msa)
        (bias, *_) = arriving()
        msa = attention.attend(msa, self._shards.take(self._msa_mask, -2), bias, again, begun)
        (msa,) = self._start([self._by_residue(msa)], begins_backward(msa)).wait()
        msa, begin = self._attend_columns(msa)
        msa = self._block.msa_transition(msa)
        if self._way == "channels":
            (pair,) = moving()
        pair, moving = self._outer_product(msa, pair)
        pair = self._update_pair(pair, begin)
        return moving()[0], pair

    def _outer_product_first(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        pair, by_sequence = self._outer_product(msa, pair, self._to_rows(pair))
        attention = self._block.msa_row_attention
        cut, again = -2 if self._way == "channels" else -1, attention.regathers(pair)
        move, regather = self._gathering(attention, attention.bias(pair), cut, again)
        arriving = self._start([move])
        (msa,) = by_sequence()
        begun = begin_attention(attention.norm, attention.attention, msa)
        (bias,) = arriving.wait()
        msa = attention.attend(msa, self._shards.take(self._msa_mask, -2), bias, regather, begun)
        moving = self._start([self._by_residue(msa)])
        pair = self._update_pair(pair, begins_backward(msa))
        msa, _ = self._attend_columns(moving.wait()[0])
        return self._block.msa_transition(msa), pair

    def _outer_product(
        self, msa: Tensor, pair: Tensor, to_rows: Sequence[Moving] = ()
    ) -> tuple[Tensor, Arriving]:
        """Updated pair, and the MSA ``[*, S, n, c_m]`` on its way to be cut by sequences."""
        outer, rows = self._block.outer_product_mean, self._way == "channels"
        left, right = ((layer.weight, layer.bias) for layer in (outer.left, outer.right))
        first, second = (right, left) if rows else (left, right)
        projections = outer.projections(msa)
        gathered, again = projections.first(*first), outer.regathers_side(pair, self._msa_mask)
        move, regather = self._gathering(outer, gathered, -2, again)
        arriving, moving = self._start_beside([move, *to_rows], [self._by_sequence(msa)])
        kept = projections.second(*second)
        whole, *rows_of_pair = arriving()[: 1 + len(to_rows)]
        pair = rows_of_pair[0] if rows_of_pair else pair
        sides = (kept, gathered) if rows else (gathered, kept)
        return outer.from_sides(sides, whole, pair, self._msa_mask, regather, rows=rows), moving

    def _gathering(
        self, layer: RegatheringLayer, x: Tensor, dim: int, regathers: bool
    ) -> tuple[Moving, Again | None]:
        """How to gather what a layer needs of all ranks, and how again in the backward pass if that is wanted."""
        move = layer.move(x, dim, self._residues)
        return (x, move), self._regathered.add(x, move) if regathers else None

    def _start(
        self, moves: Sequence[Moving], meanwhile: Callable[[], None] | None = None
    ) -> AsyncResult[tuple[Tensor, ...]]:
        return exchange_async(moves, self._shards.group, meanwhile)

    def _start_beside(self, now: Sequence[Moving], later: Sequence[Moving]) -> tuple[Arriving, Arriving]:
        """What is needed first (more may come with it), and others, of which the wait is left to who needs them."""
        if not later or sum(map(self._bytes, later)) < SMALL_MESSAGE:
            joint = functools.cache(self._start([*now, *later]).wait)
            return joint, lambda: joint()[len(now) :]
        needed = self._start(now)
        return needed.wait, self._start(later).wait

    def _bytes(self, moving: Moving) -> int:
        """Of a rank on average, so that all ranks decide alike."""
        x, move = moving
        return move.whole(x).numel() * x.element_size() // self._shards.group.size

    def _to_rows(self, pair: Tensor) -> list[Moving]:
        """The pair from columns to rows, if triangle products are made of whole channels."""
        if self._way != "channels":
            return []
        return [(pair, self._shards.resharding(pair, cut=-3, join=-2, length=self._residues))]

    def _by_residue(self, msa: Tensor) -> Moving:
        sequences = self._msa_mask.shape[-2]
        return msa, self._shards.resharding(msa, cut=-2, join=-3, length=sequences)

    def _by_sequence(self, msa: Tensor) -> Moving:
        return msa, self._shards.resharding(msa, cut=-3, join=-2, length=self._residues)

    def _attend_columns(self, msa: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
        """Attention along the sequences of ``[*, S, n, c_m]``, and what its backward pass can begin with."""
        layer, mask = self._block.msa_column_attention, self._shards.take(self._msa_mask, -1)
        if not isinstance(layer, MSAColumnAttention):  # the global one of the extra MSA stack
            return layer(msa, mask), None
        turned = attention_regathered(
            *(layer.norm, layer.attention, msa.transpose(-3, -2), None, mask.mT),
            dropout=columns(layer.dropout(msa)),
        )
        return turned.transpose(-3, -2), begins_backward(turned)

    def _update_pair(self, pair: Tensor, begin: Callable[[], None] | None) -> Tensor:
        """Updated columns.

        Args:
            pair: Cut along its columns, or along its rows where triangle products are made of whole channels.
            begin: What the backward pass can begin with while it waits for the first product's gradient, or None.
        """
        block, shards, length = self._block, self._shards, self._residues
        mask_rows, mask_columns = (shards.take(self._pair_mask, dim) for dim in (-2, -1))
        outgoing, incoming = block.triangle_multiplication_outgoing, block.triangle_multiplication_incoming
        if self._way == "sums":
            pair = outgoing.by_terms(pair, mask_columns, begin)
            pair = incoming.by_terms(pair, mask_rows, begins_backward(pair))
        elif self._way == "channels":
            pair = outgoing(pair, mask_rows, columns=False)
            pair = incoming(pair, mask_rows)
        else:
            pair = outgoing(pair, mask_columns)
            pair = incoming(shards.reshard(pair, cut=-3, join=-2, length=length), mask_rows)
        starting, ending = block.triangle_attention_starting, block.triangle_attention_ending
        move, again = self._gathering(starting, starting.bias(pair), -2, starting.regathers(pair))
        arriving = self._start([move], begins_backward(pair) if self._way == "sums" else None)
        begun = begin_attention(starting.norm, starting.attention, pair)
        (bias,) = arriving.wait()
        pair = starting.attend(pair, mask_rows, bias, again, begun)
        move, again = self._gathering(ending, ending.bias(pair), -2, ending.regathers(pair))
        to_columns = pair, shards.resharding(pair, cut=-2, join=-3, length=length)
        bias, pair = self._start([move, to_columns], begins_backward(pair)).wait()
        pair = ending.attend(pair, mask_columns, bias, again)
        found: Tensor = block.pair_transition(pair)
        return found


def product_way(residues: int, channels: int, batch: int, element_size: int, ranks: int) -> str:
    """How triangle products are made with gradients: ``sums``, ``channels`` or ``terms``.

    Args:
        residues: N.
        channels: Of the product.
        batch: Number of batch elements.
        element_size: Bytes of an element.
        ranks: How many there are.
    """
    n, elements = residues, batch * residues * residues
    way = choose_contraction("auto", n, n, n, channels, ranks)
    # Three tensors are resharded, and of the terms all but this rank's own part leave.
    extra = elements * channels * element_size * (ranks - 1) / ranks * (1 - 3 / ranks)
    if block_channels(elements, channels, ranks, training=True) < channels:
        return way
    few = ranks <= MAX_SUMMING_RANKS and extra <= MAX_EXTRA_BYTES
    return "sums" if few else way
