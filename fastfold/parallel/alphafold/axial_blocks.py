"""Evoformer and template blocks on shards: the sharded axis of each step, and when it is resharded.

The pair is cut along its columns for triangle multiplication with outgoing edges and for attention around ending
nodes, and along its rows for the other two. An Evoformer block takes and returns columns, so it reshards twice. A
template block takes and returns rows. The MSA is cut along its sequences for row attention and along its residues for
all other steps.
"""

from __future__ import annotations

from functools import partial

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


def reshard(
    shards: AxialShards,
    x: Tensor,
    cut: int,
    *,
    mask: Tensor,
    policy: ExecutionPolicy,
    memory: Tensor | None = None,
) -> AsyncResult[Tensor]:
    """Start resharding an MSA or a pair to a shard along its columns (``cut=-2``) or its rows (``cut=-3``).

    The mask is whole. In place it is done at once, in the memory of ``x``, or in ``memory`` if that is large enough.
    """
    join, length = -5 - cut, mask.shape[-4 - cut]
    if not works_in_place(policy):
        return shards.reshard_async(x, cut=cut, join=join, length=length)
    memory, blocks = x if memory is None else memory, policy.reshard_blocks
    return completed(shards.reshard_into(x, memory, cut=cut, join=join, length=length, blocks=blocks))


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
            module.keeps_gathered = stack.is_checkpointed


class ShardedEvoformerBlock(EvoformerBlock):
    """An Evoformer block on shards of both representations, step by step."""

    shards: AxialShards

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the updated shards, cut as the inputs.

        These are ``msa [*, s, N, c_m]``, or ``[*, S, n, c_m]`` if the outer product is first, and ``pair [*, N, n,
        c_z]``. The masks ``[*, S, N]`` and ``[*, N, N]`` are whole.
        """
        policy = self.msa_transition.policy
        memory = msa if works_in_place(policy) else None
        to_sequences = partial(reshard, self.shards, cut=-3, mask=msa_mask, policy=policy, memory=memory)
        if not self.outer_product_first:
            msa = self._update_msa(msa, pair, msa_mask, memory)
        # The MSA's resharding overlaps with the pair's updates. Before row attention it overlaps with the
        # outer product, unless that reads the MSA in place.
        beside = self.outer_product_first and memory is None
        moving = to_sequences(msa) if beside else None
        pair = self.outer_product_mean(msa, pair, msa_mask)
        moving = moving or to_sequences(msa)
        del msa  # its resharded copy replaces it
        if self.outer_product_first:
            return self._update_msa(moving.wait(), pair, msa_mask, memory), self._update_pair(pair, pair_mask)
        pair = self._update_pair(pair, pair_mask)
        return moving.wait(), pair

    def _update_msa(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, memory: Tensor | None) -> Tensor:
        """Update ``[*, s, N, c_m]``; return ``[*, S, n, c_m]``."""
        assert self.msa_column_attention is not None
        policy = self.msa_transition.policy
        msa = self.msa_row_attention(msa, pair, self.shards.take(msa_mask, -2))
        msa = reshard(self.shards, msa, -2, mask=msa_mask, policy=policy, memory=memory).wait()
        msa = self.msa_column_attention(msa, self.shards.take(msa_mask, -1))
        return self.msa_transition(msa)

    def _update_pair(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Update ``[*, N, n, c_z]``."""
        assert self.triangle_attention_starting is not None
        assert self.triangle_attention_ending is not None
        move = partial(reshard, self.shards, mask=pair_mask, policy=self.pair_transition.policy)
        of_rows, of_columns = (self.shards.take(pair_mask, axis) for axis in (-2, -1))
        pair = self.triangle_multiplication_outgoing(pair, of_columns)
        pair = move(pair, -3).wait()
        pair = self.triangle_multiplication_incoming(pair, of_rows)
        pair = self.triangle_attention_starting(pair, of_rows)
        pair = move(pair, -2).wait()
        pair = self.triangle_attention_ending(pair, of_columns)
        return self.pair_transition(pair)


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
        move = partial(reshard, self.shards, mask=pair_mask, policy=self.pair_transition.policy)
        of_rows, of_columns = (self.shards.take(pair_mask, axis) for axis in (-2, -1))
        if self.attention_first:
            pair = self.triangle_attention_starting(pair, of_rows)
            pair = move(pair, -2).wait()
            pair = self.triangle_attention_ending(pair, of_columns)
            pair = self.triangle_multiplication_outgoing(pair, of_columns)
            pair = move(pair, -3).wait()
            pair = self.triangle_multiplication_incoming(pair, of_rows)
            return self.pair_transition(pair)
        pair = move(pair, -2).wait()
        pair = self.triangle_multiplication_outgoing(pair, of_columns)
        pair = move(pair, -3).wait()
        pair = self.triangle_multiplication_incoming(pair, of_rows)
        pair = self.triangle_attention_starting(pair, of_rows)
        pair = move(pair, -2).wait()
        pair = self.triangle_attention_ending(pair, of_columns)
        pair = move(pair, -3).wait()
        return self.pair_transition(pair)


class AxialEvoformerStack(EvoformerStack):
    """Evoformer blocks on shards along sequences and rows; results are cut in the same way."""

    shards: AxialShards

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``msa [*, s, N, c_m]`` and ``pair [*, n, N, c_z]`` after the ``last`` block; masks are whole."""
        if not self.blocks:
            return msa, pair
        keep_gathered(self)
        first = self.blocks[0]
        assert isinstance(first, ShardedEvoformerBlock)
        residues, policy = first.outer_product_first, first.msa_transition.policy
        memory = msa if works_in_place(policy) else None
        move = partial(reshard, self.shards, mask=msa_mask, policy=policy, memory=memory)
        moving = self._entering(pair, pair_mask, policy)
        if residues:
            msa = move(msa, -2).wait()
        msa, pair = super().forward(msa, moving.wait(), msa_mask, pair_mask, last)
        moving = self._leaving(pair, pair_mask, policy)
        if residues:
            msa = move(msa, -3).wait()
        return msa, moving.wait()

    def _entering(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        return reshard(self.shards, pair, -2, mask=pair_mask, policy=policy)

    def _leaving(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        return reshard(self.shards, pair, -3, mask=pair_mask, policy=policy)


class AxialTemplatePairStack(TemplatePairStack):
    """Template blocks on a shard ``[*, n, N, c_t]`` of the pair along its rows."""

    shards: AxialShards

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, n, N, c_t]`` under the whole ``pair_mask [*, N, N]``."""
        keep_gathered(self)
        return super().forward(pair, pair_mask)
