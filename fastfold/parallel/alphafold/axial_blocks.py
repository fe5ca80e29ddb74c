"""Evoformer and template blocks on shards: the sharded axis of each step, and when it is resharded.

The pair is cut along its columns for triangle multiplication with outgoing edges and for attention around ending
nodes, and along its rows for the other two. An Evoformer block takes and returns columns, so it reshards twice. A
template block takes and returns rows. The MSA is cut along its sequences for row attention and along its residues for
all other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import (
    BlockStack,
    EvoformerBlock,
    EvoformerStack,
    TemplatePairBlock,
    TemplatePairStack,
)
from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.parallel.alphafold.regather import RegatheringLayer
from fastfold.parallel.alphafold.training_block import TrainingBlock
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.async_ops import AsyncResult, completed


def works_in_place(policy: ExecutionPolicy) -> bool:
    """Return True if results may overwrite the memory of their inputs: callers' tensors change."""
    return policy.inplace and not torch.is_grad_enabled()


def reshard_pair(
    shards: AxialShards, pair: Tensor, policy: ExecutionPolicy, *, columns: bool
) -> AsyncResult[Tensor]:
    """Start resharding the pair to a shard along its columns or its rows.

    In place it is done at once, and the result takes the memory of ``pair``.
    """
    cut, join = (-2, -3) if columns else (-3, -2)
    where = {"cut": cut, "join": join, "length": pair.shape[cut]}
    if works_in_place(policy):
        return completed(shards.reshard_into(pair, pair, **where, blocks=policy.reshard_blocks))
    return shards.reshard_async(pair, **where)


def reshard_msa(
    shards: AxialShards,
    msa: Tensor,
    msa_mask: Tensor,
    policy: ExecutionPolicy,
    *,
    residues: bool,
    memory: Tensor | None = None,
) -> AsyncResult[Tensor]:
    """Start resharding the MSA to a shard along its residues or its sequences.

    With a ``memory`` it is done at once, in that tensor's memory if it is large enough.
    """
    sequences, length = msa_mask.shape[-2:]
    cut, join, whole = (-2, -3, sequences) if residues else (-3, -2, length)
    where = {"cut": cut, "join": join, "length": whole}
    if memory is None:
        return shards.reshard_async(msa, **where)
    return completed(shards.reshard_into(msa, memory, **where, blocks=policy.reshard_blocks))


def run_pair_steps(
    shards: AxialShards, steps: Sequence[Any], pair: Tensor, pair_mask: Tensor, *, columns: bool, end: bool
) -> Tensor:
    """Run triangle steps in order, each on the shard that it needs.

    Args:
        shards: The cut.
        steps: :class:`AxialTriangleAttention` and :class:`AxialTriangleMultiplication` modules.
        pair: A shard along the columns or the rows.
        pair_mask: ``[*, N, N]``.
        columns: True if ``pair`` is cut along its columns.
        end: True if the result is to be cut along its columns.
    """
    for step in steps:
        if step.columns != columns:
            pair = reshard_pair(shards, pair, step.policy, columns=step.columns).wait()
            columns = step.columns
        pair = step(pair, shards.take(pair_mask, -1 if columns else -2))
    if columns == end:
        return pair
    return reshard_pair(shards, pair, steps[-1].policy, columns=end).wait()


def refuse_missing_steps(model: nn.Module) -> None:
    """Check that every Evoformer block has all its steps; each step has a form for shards.

    Raises:
        ConfigError: A block lacks steps, as those of ``mini`` do.
    """
    for block in model.modules():
        if isinstance(block, EvoformerBlock) and None in (
            block.msa_column_attention,
            block.triangle_attention_starting,
            block.triangle_attention_ending,
        ):
            raise ConfigError(
                "dap expects AlphaFold's whole blocks, and this network's blocks lack attention along an axis: use "
                "dap=1 or another network"
            )


def keep_gathered(stack: BlockStack) -> None:
    """Let the steps of recomputed blocks keep gathered tensors: recomputing gathers them again anyway."""
    for module in stack.blocks.modules():
        if isinstance(module, RegatheringLayer):
            module.keeps_gathered = stack.checkpointing


class ShardedEvoformerBlock(EvoformerBlock):
    """An Evoformer block on shards of both representations, step by step."""

    shards: AxialShards

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the updated shards, cut as the inputs.

        Args:
            msa: ``[*, s, N, c_m]``, or ``[*, S, n, c_m]`` if the outer product is first.
            pair: ``[*, N, n, c_z]``.
            msa_mask: ``[*, S, N]``, whole.
            pair_mask: ``[*, N, N]``, whole.
        """
        memory = msa if works_in_place(self.msa_transition.policy) else None
        if not self.outer_product_first:
            msa = self._update_msa(msa, pair, msa_mask, memory)
        # The MSA's resharding overlaps with the pair's updates. Before row attention it overlaps with the
        # outer product, unless that reads the MSA in place.
        beside = self.outer_product_first and memory is None
        moving = self._by_sequence(msa, msa_mask, memory) if beside else None
        pair = self.outer_product_mean(msa, pair, msa_mask)
        moving = moving or self._by_sequence(msa, msa_mask, memory)
        del msa  # its resharded copy replaces it
        if self.outer_product_first:
            return self._update_msa(moving.wait(), pair, msa_mask, memory), self._update_pair(pair, pair_mask)
        pair = self._update_pair(pair, pair_mask)
        return moving.wait(), pair

    def _by_sequence(self, msa: Tensor, msa_mask: Tensor, memory: Tensor | None) -> AsyncResult[Tensor]:
        policy = self.msa_transition.policy
        return reshard_msa(self.shards, msa, msa_mask, policy, residues=False, memory=memory)

    def _update_msa(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, memory: Tensor | None) -> Tensor:
        """Update ``[*, s, N, c_m]``; return ``[*, S, n, c_m]``."""
        msa = self.msa_row_attention(msa, pair, self.shards.take(msa_mask, -2))
        policy = self.msa_transition.policy
        msa = reshard_msa(self.shards, msa, msa_mask, policy, residues=True, memory=memory).wait()
        assert self.msa_column_attention is not None  # refuse_missing_steps() guarantees it
        msa = self.msa_column_attention(msa, self.shards.take(msa_mask, -1))
        return self.msa_transition(msa)

    def _update_pair(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        steps = self._triangle_steps()
        return self.pair_transition(
            run_pair_steps(self.shards, steps, pair, pair_mask, columns=True, end=True)
        )

    def _triangle_steps(self) -> tuple[Any, ...]:
        return (
            self.triangle_multiplication_outgoing,
            self.triangle_multiplication_incoming,
            self.triangle_attention_starting,
            self.triangle_attention_ending,
        )


class AxialEvoformerBlock(ShardedEvoformerBlock):
    """An Evoformer block on shards of both representations; with gradients it sends as few messages as possible."""

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the updated shards; see :class:`ShardedEvoformerBlock`."""
        if torch.is_grad_enabled():
            return TrainingBlock(self, msa_mask, pair_mask)(msa, pair)
        return super().forward(msa, pair, msa_mask, pair_mask)


class AxialTemplatePairBlock(TemplatePairBlock):
    """A template block on a shard ``[*, n, N, c_t]`` of the pair along its rows."""

    shards: AxialShards

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, n, N, c_t]`` under the whole ``pair_mask [*, N, N]``."""
        attention = (self.triangle_attention_starting, self.triangle_attention_ending)
        multiplication = (self.triangle_multiplication_outgoing, self.triangle_multiplication_incoming)
        steps = (*attention, *multiplication) if self.attention_first else (*multiplication, *attention)
        pair = run_pair_steps(self.shards, steps, pair, pair_mask, columns=False, end=False)
        return self.pair_transition(pair)


class AxialEvoformerStack(EvoformerStack):
    """Evoformer blocks on shards along sequences and rows; results are cut in the same way."""

    shards: AxialShards

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the updated ``msa [*, s, N, c_m]`` and ``pair [*, n, N, c_z]``; masks are whole."""
        if not self.blocks:
            return msa, pair
        keep_gathered(self)
        first = self.blocks[0]
        assert isinstance(first, ShardedEvoformerBlock)
        residues, policy = first.outer_product_first, first.msa_transition.policy
        memory = msa if works_in_place(policy) else None
        moving = self._entering(pair, pair_mask, policy)
        if residues:
            msa = reshard_msa(self.shards, msa, msa_mask, policy, residues=True, memory=memory).wait()
        msa, pair = super().forward(msa, moving.wait(), msa_mask, pair_mask)
        moving = self._leaving(pair, pair_mask, policy)
        if residues:
            msa = reshard_msa(self.shards, msa, msa_mask, policy, residues=False, memory=memory).wait()
        return msa, moving.wait()

    def _entering(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        """Start moving rows of the pair to the layout of the blocks."""
        return reshard_pair(self.shards, pair, policy, columns=True)

    def _leaving(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        """Start moving the pair from the blocks' layout to rows."""
        return reshard_pair(self.shards, pair, policy, columns=False)


class AxialTemplatePairStack(TemplatePairStack):
    """Template blocks on a shard ``[*, n, N, c_t]`` of the pair along its rows."""

    shards: AxialShards

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, n, N, c_t]`` under the whole ``pair_mask [*, N, N]``."""
        keep_gathered(self)
        return super().forward(pair, pair_mask)
