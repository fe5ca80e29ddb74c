"""Evoformer and template blocks on shards: which axis is cut in which step, and when it is resharded.

The pair is cut along its columns for triangle multiplication with outgoing edges and for attention around ending
nodes, along its rows for the other two. An Evoformer block takes and gives columns, so that it is resharded twice; a
template block takes and gives rows. The MSA is cut along its sequences for row attention and along its residues for
everything else.
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
    """Whether results may take the memory of what they are made of: callers' tensors change."""
    return policy.inplace and not torch.is_grad_enabled()


def reshard_pair(
    shards: AxialShards, pair: Tensor, policy: ExecutionPolicy, *, columns: bool
) -> AsyncResult[Tensor]:
    """Start resharding the pair to a shard along its columns, or to one along its rows.

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
    """Start resharding the MSA to a shard along its residues, or to one along its sequences.

    With a ``memory`` it is done at once, over that tensor's memory if there is enough of it.
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
        if step.columns != columns:
            pair = reshard_pair(shards, pair, step.policy, columns=step.columns).wait()
            columns = step.columns
        pair = step(pair, shards.take(pair_mask, -1 if columns else -2))
    if columns == end:
        return pair
    return reshard_pair(shards, pair, steps[-1].policy, columns=end).wait()


def refuse_missing_steps(model: nn.Module) -> None:
    """See that every Evoformer block has all its steps, each of which has a form for shards.

    Raises:
        ConfigError: One lacks some, as those of ``mini`` do.
    """
    for block in model.modules():
        if isinstance(block, EvoformerBlock) and None in (
            block.msa_column_attention,
            block.triangle_attention_starting,
            block.triangle_attention_ending,
        ):
            raise ConfigError(
                "dynamic axial parallelism shards AlphaFold's whole blocks; those of this network lack attention along "
                "an axis: use dap=1, or another network"
            )


def keep_gathered(stack: BlockStack) -> None:
    """Let the steps of recomputed blocks keep what they gather: recomputing gathers it again anyway."""
    for module in stack.blocks.modules():
        if isinstance(module, RegatheringLayer):
            module.keeps_gathered = stack.checkpointing


class ShardedEvoformerBlock(EvoformerBlock):
    """An Evoformer block on shards of both representations, step by step."""

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
        memory = msa if works_in_place(self.msa_transition.policy) else None
        if not self.outer_product_first:
            msa = self._update_msa(msa, pair, msa_mask, memory)
        # Beside the updates of the pair; before row attention beside the outer product, unless that reads it in place.
        beside = self.outer_product_first and memory is None
        moving = self._by_sequence(msa, msa_mask, memory) if beside else None
        pair = self.outer_product_mean(msa, pair, msa_mask)
        moving = moving or self._by_sequence(msa, msa_mask, memory)
        del msa  # its copy is under way
        if self.outer_product_first:
            return self._update_msa(moving.wait(), pair, msa_mask, memory), self._update_pair(pair, pair_mask)
        pair = self._update_pair(pair, pair_mask)
        return moving.wait(), pair

    def _by_sequence(self, msa: Tensor, msa_mask: Tensor, memory: Tensor | None) -> AsyncResult[Tensor]:
        policy = self.msa_transition.policy
        return reshard_msa(self.shards, msa, msa_mask, policy, residues=False, memory=memory)

    def _update_msa(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, memory: Tensor | None) -> Tensor:
        """From ``[*, s, N, c_m]`` to the updated ``[*, S, n, c_m]``."""
        msa = self.msa_row_attention(msa, pair, self.shards.take(msa_mask, -2))
        policy = self.msa_transition.policy
        msa = reshard_msa(self.shards, msa, msa_mask, policy, residues=True, memory=memory).wait()
        assert self.msa_column_attention is not None  # blocks without are refused
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
    """An Evoformer block on shards of both representations; with gradients in as few messages as may be."""

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`ShardedEvoformerBlock`."""
        if torch.is_grad_enabled():
            return TrainingBlock(self, msa_mask, pair_mask)(msa, pair)
        return super().forward(msa, pair, msa_mask, pair_mask)


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


class AxialEvoformerStack(EvoformerStack):
    """Evoformer blocks on shards along sequences and rows, which come back cut in the same way."""

    shards: AxialShards

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Updated ``msa [*, s, N, c_m]`` and ``pair [*, n, N, c_z]``; masks are whole."""
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
        """Start moving rows of the pair to what the blocks work on."""
        return reshard_pair(self.shards, pair, policy, columns=True)

    def _leaving(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        """Start moving it back."""
        return reshard_pair(self.shards, pair, policy, columns=False)


class AxialTemplatePairStack(TemplatePairStack):
    """Template blocks on a shard ``[*, n, N, c_t]`` of the pair along its rows."""

    shards: AxialShards

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Updated ``pair [*, n, N, c_t]`` under the whole ``pair_mask [*, N, N]``."""
        keep_gathered(self)
        return super().forward(pair, pair_mask)
