"""Evoformer and template blocks on shards: which axis is cut in which step, and when it is switched.

The pair is cut along its columns for triangle multiplication with outgoing edges and for attention around ending
nodes, along its rows for the other two. An Evoformer block takes and gives columns, so that it switches twice; a
template block takes and gives rows. The MSA is cut along its sequences for row attention and along its residues for
everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastfold.evoformer.evoformer import BlockStack, EvoformerBlock, TemplatePairBlock
from fastfold.parallel.alphafold.axial_steps import AxialTriangleAttention, AxialTriangleMultiplication
from fastfold.parallel.axial import AxialShards
from fastfold.parallel.handle import Handle

PairStep = AxialTriangleAttention | AxialTriangleMultiplication


def switch_pair(shards: AxialShards, pair: Tensor, *, columns: bool) -> Handle:
    """Start switching the pair to a shard along its columns, or to one along its rows."""
    if columns:
        return shards.switch_async(pair, cut=-2, join=-3, length=pair.shape[-2])
    return shards.switch_async(pair, cut=-3, join=-2, length=pair.shape[-3])


def switch_msa(shards: AxialShards, msa: Tensor, msa_mask: Tensor, *, residues: bool) -> Handle:
    """Start switching the MSA to a shard along its residues, or to one along its sequences."""
    sequences, length = msa_mask.shape[-2:]
    if residues:
        return shards.switch_async(msa, cut=-2, join=-3, length=sequences)
    return shards.switch_async(msa, cut=-3, join=-2, length=length)


def run_pair_steps(
    shards: AxialShards, steps: Sequence[Any], pair: Tensor, pair_mask: Tensor, *, columns: bool, end: bool
) -> Tensor:
    """Triangle steps in order, each on the shard that it needs.

    Args:
        shards: The cut.
        steps: :class:`AxialTriangleAttention` and :class:`AxialTriangleMultiplication` modules.
        pair: A shard along the columns or the rows.
        pair_mask: ``[*, N, N]``.
        columns: Which of the two ``pair`` is.
        end: Which of the two the result shall be.
    """
    for step in steps:
        bias = None
        if step.columns != columns:
            # The bias is small and ready first: it travels before the pair does, and is computed from either shard.
            attends = isinstance(step, AxialTriangleAttention)
            started = step.start_bias(pair, columns=columns) if attends else None
            moved = switch_pair(shards, pair, columns=step.columns)
            bias = None if started is None else started.wait()
            pair, columns = moved.wait(), step.columns
        mask = shards.take(pair_mask, -1 if columns else -2)
        pair = step(pair, mask) if bias is None else step(pair, mask, bias)
    return pair if columns == end else switch_pair(shards, pair, columns=end).wait()


class AxialEvoformerBlock(EvoformerBlock):
    """An Evoformer block on shards of both representations."""

    shards: AxialShards

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Updated shards, cut as they came.

        Args:
            msa: ``[*, s, N, c_m]``; where the outer product comes first ``[*, S, n, c_m]``.
            pair: ``[*, N, n, c_z]``.
            msa_mask: ``[*, S, N]``, whole.
            pair_mask: ``[*, N, N]``, whole.
        """
        if self.outer_product_first:
            by_sequence = switch_msa(self.shards, msa, msa_mask, residues=False)
            pair = self.outer_product_mean(msa, pair, msa_mask)
            msa = self._update_msa(by_sequence.wait(), pair, msa_mask)
            return msa, self._update_pair(pair, pair_mask)
        msa = self._update_msa(msa, pair, msa_mask)
        pair = self.outer_product_mean(msa, pair, msa_mask)
        by_sequence = switch_msa(self.shards, msa, msa_mask, residues=False)
        del msa  # its copy is under way
        pair = self._update_pair(pair, pair_mask)
        return by_sequence.wait(), pair

    def _update_msa(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """From ``[*, s, N, c_m]`` to the updated ``[*, S, n, c_m]``."""
        msa = self.msa_row_attention(msa, pair, self.shards.take(msa_mask, -2))
        msa = switch_msa(self.shards, msa, msa_mask, residues=True).wait()
        msa = self.msa_column_attention(msa, self.shards.take(msa_mask, -1))
        return self.msa_transition(msa)

    def _update_pair(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        steps = (
            self.triangle_multiplication_outgoing,
            self.triangle_multiplication_incoming,
            self.triangle_attention_starting,
            self.triangle_attention_ending,
        )
        return self.pair_transition(
            run_pair_steps(self.shards, steps, pair, pair_mask, columns=True, end=True)
        )


class AxialTemplatePairBlock(TemplatePairBlock):
    """A template block on a shard ``[*, n, N, c_t]`` of the pair along its rows."""

    shards: AxialShards

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Updated ``pair [*, n, N, c_t]`` under the whole ``pair_mask [*, N, N]``."""
        attention = (self.triangle_attention_starting, self.triangle_attention_ending)
        multiplication = (self.triangle_multiplication_outgoing, self.triangle_multiplication_incoming)
        steps = (*attention, *multiplication) if self.attention_first else (*multiplication, *attention)
        pair = run_pair_steps(self.shards, steps, pair, pair_mask, columns=False, end=False)
        return self.pair_transition(pair)


class AxialBlockStack(BlockStack):
    """A stack of Evoformer blocks on shards along sequences and rows, which it gives back likewise.

    A stack of template blocks takes and gives the rows that its blocks do.
    """

    shards: AxialShards

    def forward(self, *state_and_masks: Tensor) -> Any:
        """Run all blocks on ``(msa, pair, msa_mask, pair_mask)`` or ``(pair, pair_mask)``; masks are whole."""
        if len(state_and_masks) == 2 or not self.blocks:
            return super().forward(*state_and_masks)
        msa, pair, msa_mask, pair_mask = state_and_masks
        residues = bool(self.blocks[0].outer_product_first)
        columns = switch_pair(self.shards, pair, columns=True)
        if residues:
            msa = switch_msa(self.shards, msa, msa_mask, residues=True).wait()
        msa, pair = super().forward(msa, columns.wait(), msa_mask, pair_mask)
        rows = switch_pair(self.shards, pair, columns=False)
        if residues:
            msa = switch_msa(self.shards, msa, msa_mask, residues=False).wait()
        return msa, rows.wait()
