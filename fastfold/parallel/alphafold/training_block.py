"""An Evoformer block on shards while gradients are recorded, with as few messages as its dependencies allow.

Tensors that are ready at one time are sent in one message: a bias with the resharded pair, the outer product's
projection with the MSA, both factors of a triangle product. A tensor gets its own message only if it is large and
other work can be done before it is needed. Triangle products are computed in one of three ways:

- ``sums``: the terms of each are summed in one message, and the pair is cut along its rows from the first product to
  attention around ending nodes. This needs the fewest messages. It is used on the GPUs of one machine, unless the
  terms are too large.
- ``channels``: factors and product are resharded, which works for any cut of the pair. The pair is cut along its rows
  from the outer product on.
- ``terms``: the terms are summed for one group of channels after another, and the pair changes its cut between the
  products.

Messages overlap with independent work: the bias with queries, keys and values, and one projection of the outer product
with the other. In the backward pass they overlap with the next operators' recomputation from their inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

from torch import Tensor

from fastfold.evoformer.execution import columns
from fastfold.evoformer.msa_attention import MSAColumnAttention
from fastfold.parallel.alphafold.regather import (
    Regather,
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

TensorMove = tuple[Tensor, Move]
Begin = Callable[[], None]
WaitForTensors = Callable[[], tuple[Tensor, ...]]

SMALL_MESSAGE = 2**22  #: Size in bytes below which a tensor is sent and waited for together with another one

MAX_EXTRA_BYTES = 24 * 2**20
"""Number of additional bytes a rank may send to save a message.

A link of 360 GB/s sends as much while a message starts and the five kernels around it are launched (70 µs by the
constants of ``planner/calibration.json``).
"""

MAX_SUMMING_RANKS = 8  #: Number of ranks that such a link joins: the GPUs of a machine


class TrainingBlock:
    """One pass of a block.

    ``msa_mask [*, S, N]`` and ``pair_mask [*, N, N]`` are whole.
    """

    def __init__(self, block: Any, msa_mask: Tensor, pair_mask: Tensor) -> None:
        self._block, self._msa_mask, self._pair_mask = block, msa_mask, pair_mask
        self._shards: AxialShards = block.shards
        self._residues = pair_mask.shape[-1]
        self._regathered = Regathered(self._shards.group)
        self._contraction = ""

    def __call__(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Return the updated shards, cut as the inputs: see :class:`~.axial_blocks.ShardedEvoformerBlock`."""
        channels = len(self._block.triangle_multiplication_outgoing.projection.weight) // 2
        self._contraction = _choose_training_contraction(
            self._residues, channels, pair.shape[:-3].numel(), pair.element_size(), self._shards.group.size
        )
        update = self._outer_product_first if self._block.outer_product_first else self._outer_product_last
        msa, pair = update(msa, pair)
        return msa, self._regathered.started_by(pair)

    def _outer_product_last(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        attention = self._block.msa_row_attention
        move, again = self._gathering(attention, attention.bias(pair), -1, attention.regathers(pair))
        needed, later = self._start_overlapping([move], self._to_rows(pair))
        projections = begin_attention(attention.norm, attention.attention, msa)
        (bias, *_) = needed()
        msa = attention.attend(msa, self._shards.take(self._msa_mask, -2), bias, again, projections)
        (msa,) = self._start([self._reshard_msa(msa, -2)], begins_backward(msa)).wait()
        msa, begin = self._update_columns(msa)
        if self._contraction == "channels":
            (pair,) = later()
        pair, later = self._outer_product(msa, pair)
        pair = self._update_pair(pair, begin)
        return later()[0], pair

    def _outer_product_first(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        pair, by_sequence = self._outer_product(msa, pair, self._to_rows(pair))
        attention = self._block.msa_row_attention
        cut, again = -2 if self._contraction == "channels" else -1, attention.regathers(pair)
        move, regather = self._gathering(attention, attention.bias(pair), cut, again)
        gathering = self._start([move])
        (msa,) = by_sequence()
        projections = begin_attention(attention.norm, attention.attention, msa)
        (bias,) = gathering.wait()
        msa = attention.attend(msa, self._shards.take(self._msa_mask, -2), bias, regather, projections)
        later, begin, has_gradient = self._start([self._reshard_msa(msa, -2)]), begins_backward(msa), Event()
        pair = self._update_pair(pair, lambda: begin() if has_gradient.is_set() else None)
        msa, _ = self._update_columns(later.wait()[0])
        if msa.requires_grad:
            # The MSA of the last block of the extra stack is not used, so it gets no gradient.
            msa.register_hook(lambda _: has_gradient.set())
        return msa, pair

    def _outer_product(
        self, msa: Tensor, pair: Tensor, to_rows: Sequence[TensorMove] = ()
    ) -> tuple[Tensor, WaitForTensors]:
        """Return the updated pair, and the MSA ``[*, S, n, c_m]`` while it is resharded to sequences."""
        outer, rows = self._block.outer_product_mean, self._contraction == "channels"
        left, right = ((layer.weight, layer.bias) for layer in (outer.left, outer.right))
        first, second = (right, left) if rows else (left, right)
        projections = outer.projections(msa)
        gathered, again = projections.first(*first), outer.regathers_side(pair, self._msa_mask)
        move, regather = self._gathering(outer, gathered, -2, again)
        needed, later = self._start_overlapping([move, *to_rows], [self._reshard_msa(msa, -3)])
        kept = projections.second(*second)
        whole, *rows_of_pair = needed()[: 1 + len(to_rows)]
        pair = rows_of_pair[0] if rows_of_pair else pair
        sides = (kept, gathered) if rows else (gathered, kept)
        return outer.from_sides(sides, whole, pair, self._msa_mask, regather, rows=rows), later

    def _gathering(
        self, layer: RegatheringLayer, x: Tensor, dim: int, regathers: bool
    ) -> tuple[TensorMove, Regather | None]:
        """Return the moves that gather a layer's input, and gather it again for the backward pass, or None."""
        move = layer.move(x, dim, self._residues)
        return (x, move), self._regathered.add(x, move) if regathers else None

    def _start(
        self, moves: Sequence[TensorMove], meanwhile: Callable[[], None] | None = None
    ) -> AsyncResult[tuple[Tensor, ...]]:
        return exchange_async(moves, self._shards.group, meanwhile)

    def _start_overlapping(
        self, now: Sequence[TensorMove], later: Sequence[TensorMove]
    ) -> tuple[WaitForTensors, WaitForTensors]:
        """Start moves that are needed first and later ones; small ones share a message."""
        if not later or sum(map(self._bytes, later)) < SMALL_MESSAGE:
            joint = functools.cache(self._start([*now, *later]).wait)
            return joint, lambda: joint()[len(now) :]
        needed = self._start(now)
        return needed.wait, self._start(later).wait

    def _bytes(self, tensor_move: TensorMove) -> int:
        """Return the bytes of moves of an average rank, so that all ranks decide alike."""
        x, move = tensor_move
        return move.whole(x).numel() * x.element_size() // self._shards.group.size

    def _to_rows(self, pair: Tensor) -> list[TensorMove]:
        """Return the pair's move from columns to rows, if triangle products use whole channels."""
        if self._contraction != "channels":
            return []
        return [(pair, self._shards.resharding(pair, cut=-3, join=-2, length=self._residues))]

    def _reshard_msa(self, msa: Tensor, cut: int) -> TensorMove:
        """Return the MSA's move to a cut along its residues (-2) or its sequences (-3)."""
        return msa, self._shards.resharding(
            msa, cut=cut, join=-5 - cut, length=self._msa_mask.shape[-4 - cut]
        )

    def _update_columns(self, msa: Tensor) -> tuple[Tensor, Begin | None]:
        """Return the updated ``[*, S, n, c_m]``, and the part of attention's backward pass that needs no gradient."""
        begin: Begin | None = None
        layer, mask = self._block.msa_column_attention, self._shards.take(self._msa_mask, -1)
        if isinstance(layer, MSAColumnAttention):
            turned = attention_regathered(
                *(layer.norm, layer.attention, msa.transpose(-3, -2), None, mask.mT),
                dropout=columns(layer.dropout(msa)),
            )
            msa, begin = turned.transpose(-3, -2), begins_backward(turned)
        else:
            msa = layer(msa, mask)
        return self._block.msa_transition(msa), begin

    def _update_pair(self, pair: Tensor, begin: Begin | None) -> Tensor:
        """Return the updated columns.

        The pair is cut along its columns, or along its rows where triangle products use whole channels. The backward
        pass runs ``begin`` while it waits for the first product's gradient.
        """
        cut = -3 if self._contraction == "channels" else -2
        block = self._block
        pair, cut, begin = self._multiply(block.triangle_multiplication_outgoing, pair, cut, -2, begin)
        pair, cut, begin = self._multiply(block.triangle_multiplication_incoming, pair, cut, -3, begin)
        pair, cut, begin = self._attend(block.triangle_attention_starting, pair, cut, -3, begin)
        pair, _, _ = self._attend(block.triangle_attention_ending, pair, cut, -2, begin)
        return block.pair_transition(pair)

    def _multiply(
        self, layer: Any, pair: Tensor, cut: int, needed: int, begin: Begin | None
    ) -> tuple[Tensor, int, Begin | None]:
        """Return the pair after a triangle multiplication, its cut, and the part of its backward pass to begin."""
        if self._contraction == "sums":
            pair = layer.by_terms(pair, self._own_mask(needed), begin)
            return pair, -3, begins_backward(pair)
        if self._contraction == "channels":
            return layer(pair, self._own_mask(cut), columns=False), cut, None
        if needed != cut:
            pair = self._shards.reshard(pair, cut=needed, join=cut, length=self._residues)
        return layer(pair, self._own_mask(needed)), needed, None

    def _attend(
        self, layer: Any, pair: Tensor, cut: int, needed: int, begin: Begin | None
    ) -> tuple[Tensor, int, Begin]:
        """Return the pair after triangle attention; arguments and results as of :meth:`_multiply`."""
        move, again = self._gathering(layer, layer.bias(pair), cut + 1, layer.regathers(pair))
        if needed == cut:
            gathering = self._start([move], begin)
            projections = begin_attention(layer.norm, layer.attention, pair)
            (bias,) = gathering.wait()
        else:
            moved = pair, self._shards.resharding(pair, cut=needed, join=cut, length=self._residues)
            (bias, pair), projections = self._start([move, moved], begin).wait(), []
        pair = layer.attend(pair, self._own_mask(needed), bias, again, projections)
        return pair, needed, begins_backward(pair)

    def _own_mask(self, cut: int) -> Tensor:
        return self._shards.take(self._pair_mask, cut + 1)


def _choose_training_contraction(
    residues: int, channels: int, batch: int, element_size: int, ranks: int
) -> str:
    """Choose how to compute triangle products with gradients: ``sums``, ``channels`` or ``terms``."""
    n, elements = residues, batch * residues * residues
    way = choose_contraction("auto", n, n, n, channels, ranks)
    # Three tensors are resharded. Of the terms, all but this rank's own part are sent.
    extra = elements * channels * element_size * (ranks - 1) / ranks * (1 - 3 / ranks)
    if block_channels(elements, channels, ranks, training=True) < channels:
        return way
    few = ranks <= MAX_SUMMING_RANKS and extra <= MAX_EXTRA_BYTES
    return "sums" if few else way
