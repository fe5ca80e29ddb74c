"""An Evoformer block on shards where gradients are recorded: as few messages as its dependencies allow.

What leaves at one time leaves in one message: a bias with the pair that is resharded, the outer product's projection
with the MSA, both factors of a triangle product. Only what is big, and not needed before something else is computed,
leaves in a message of its own, which nobody waits for. Where triangle products are made of whole channels, which any
cut of the pair serves, the pair is cut along its rows from the outer product to attention around ending nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastfold.parallel.alphafold.regather import Again, Regathered, RegatheringLayer, recomputed
from fastfold.parallel.axial.matmul import choose_contraction
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.collectives import exchange_async
from fastfold.parallel.comm.moves import Move

Moving = tuple[Tensor, Move]
Arriving = Callable[[], tuple[Tensor, ...]]

SMALL_MESSAGE = 2**22
"""Bytes under which a tensor leaves with another one, and is waited for, rather than in a message of its own."""


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
        channels, n = len(block.triangle_multiplication_outgoing.projection.weight) // 2, self._residues
        way = choose_contraction("auto", n, n, n, channels, self._shards.group.size)
        self._by_rows = way == "channels"
        self._regathered = Regathered(self._shards.group)

    def __call__(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Updated shards, cut as they came: see :class:`~.axial_blocks.ShardedEvoformerBlock`."""
        update = self._outer_product_first if self._block.outer_product_first else self._outer_product_last
        msa, pair = update(msa, pair)
        return msa, self._regathered.started_by(pair)

    def _outer_product_last(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        attention = self._block.msa_row_attention
        move, again = self._gathering(attention, attention.bias(pair), -1, attention.regathers(pair))
        (bias,), moving = self._send_beside([move], self._to_rows(pair))
        msa = attention.attend(msa, pair, self._shards.take(self._msa_mask, -2), bias, again)
        (msa,) = self._send([self._by_residue(msa)])
        msa = self._update_columns(msa)
        if self._by_rows:
            (pair,) = moving()
        pair, moving = self._outer_product(msa, pair)
        pair = self._update_pair(pair)
        return moving()[0], pair

    def _outer_product_first(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        pair, by_sequence = self._outer_product(msa, pair, self._to_rows(pair))
        attention = self._block.msa_row_attention
        cut, again = -2 if self._by_rows else -1, attention.regathers(pair)
        move, regather = self._gathering(attention, attention.bias(pair), cut, again)
        (bias,) = self._send([move])
        (msa,) = by_sequence()
        msa = attention.attend(msa, pair, self._shards.take(self._msa_mask, -2), bias, regather)
        moving = exchange_async([self._by_residue(msa)], self._shards.group)
        pair = self._update_pair(pair)
        return self._update_columns(moving.wait()[0]), pair

    def _outer_product(
        self, msa: Tensor, pair: Tensor, to_rows: Sequence[Moving] = ()
    ) -> tuple[Tensor, Arriving]:
        """Updated pair, and the MSA ``[*, S, n, c_m]`` on its way to be cut by sequences."""
        outer, rows = self._block.outer_product_mean, self._by_rows
        sides, again = recomputed(outer.sides, msa), outer.regathers_side(pair, self._msa_mask)
        move, regather = self._gathering(outer, sides[1 if rows else 0], -2, again)
        (whole, *rows_of_pair), moving = self._send_beside([move, *to_rows], [self._by_sequence(msa)])
        pair = rows_of_pair[0] if rows_of_pair else pair
        return outer.from_sides(sides, whole, pair, self._msa_mask, regather, rows=rows), moving

    def _gathering(
        self, layer: RegatheringLayer, x: Tensor, dim: int, regathers: bool
    ) -> tuple[Moving, Again | None]:
        """How to gather what a layer needs of all ranks, and how again in the backward pass if that is wanted."""
        move = layer.move(x, dim, self._residues)
        return (x, move), self._regathered.add(x, move) if regathers else None

    def _send(self, moves: Sequence[Moving]) -> tuple[Tensor, ...]:
        return exchange_async(moves, self._shards.group).wait()

    def _send_beside(
        self, now: Sequence[Moving], later: Sequence[Moving]
    ) -> tuple[tuple[Tensor, ...], Arriving]:
        """What is needed at once, and others, of which the wait is left to who needs them."""
        if not later or sum(map(self._bytes, later)) < SMALL_MESSAGE:
            found = self._send([*now, *later])
            return found[: len(now)], lambda: found[len(now) :]
        needed = exchange_async(now, self._shards.group)
        moving = exchange_async(later, self._shards.group)
        return needed.wait(), moving.wait

    def _bytes(self, moving: Moving) -> int:
        """Of a rank on average, so that all ranks decide alike."""
        x, move = moving
        return move.whole(x).numel() * x.element_size() // self._shards.group.size

    def _to_rows(self, pair: Tensor) -> list[Moving]:
        """The pair from columns to rows, if triangle products are made so."""
        if not self._by_rows:
            return []
        return [(pair, self._shards.resharding(pair, cut=-3, join=-2, length=self._residues))]

    def _by_residue(self, msa: Tensor) -> Moving:
        sequences = self._msa_mask.shape[-2]
        return msa, self._shards.resharding(msa, cut=-2, join=-3, length=sequences)

    def _by_sequence(self, msa: Tensor) -> Moving:
        return msa, self._shards.resharding(msa, cut=-3, join=-2, length=self._residues)

    def _update_columns(self, msa: Tensor) -> Tensor:
        """Attention along the sequences and the transition, of ``[*, S, n, c_m]``."""
        msa = self._block.msa_column_attention(msa, self._shards.take(self._msa_mask, -1))
        found: Tensor = self._block.msa_transition(msa)
        return found

    def _update_pair(self, pair: Tensor) -> Tensor:
        """From rows, or columns where triangle products are sums of terms, to updated columns."""
        block, shards, length = self._block, self._shards, self._residues
        mask_rows, mask_columns = (shards.take(self._pair_mask, dim) for dim in (-2, -1))
        if self._by_rows:
            pair = block.triangle_multiplication_outgoing(pair, mask_rows, columns=False)
        else:
            pair = block.triangle_multiplication_outgoing(pair, mask_columns)
            pair = shards.reshard(pair, cut=-3, join=-2, length=length)
        pair = block.triangle_multiplication_incoming(pair, mask_rows)
        starting, ending = block.triangle_attention_starting, block.triangle_attention_ending
        move, again = self._gathering(starting, starting.bias(pair), -2, starting.regathers(pair))
        (bias,) = self._send([move])
        pair = starting.attend(pair, mask_rows, bias, again)
        move, again = self._gathering(ending, ending.bias(pair), -2, ending.regathers(pair))
        to_columns = pair, shards.resharding(pair, cut=-2, join=-3, length=length)
        bias, pair = self._send([move, to_columns])
        pair = ending.attend(pair, mask_columns, bias, again)
        found: Tensor = block.pair_transition(pair)
        return found
