"""Evoformer and template blocks on shards: the sharded axis of each step, and when it is resharded.

The pair is cut along its columns for triangle multiplication with outgoing edges and for attention around ending
nodes, and along its rows for the other two. An Evoformer block takes and returns columns, so it reshards twice. A
template block takes and returns rows. The MSA is cut along its sequences for row attention and along its residues for
all other steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import (
    EVOFORMER_STEPS,
    BlockStack,
    EvoformerBlock,
    EvoformerStack,
    Step,
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
    where = {"cut": cut, "join": -5 - cut, "length": mask.shape[-4 - cut]}
    if not works_in_place(policy):
        return shards.reshard_async(x, **where)
    memory = x if memory is None else memory
    return completed(shards.reshard_into(x, memory, **where, blocks=policy.reshard_blocks))


def _run_steps(
    block: ShardedEvoformerBlock | AxialTemplatePairBlock,
    steps: Iterable[Step],
    x: Tensor,
    mask: Tensor,
    *,
    cut: int,
    end: int,
    policy: ExecutionPolicy,
    memory: Tensor | None = None,
    pair: Tensor | None = None,
) -> Tensor:
    """Run steps that update one tensor, whose shard is cut along ``cut`` before and along ``end`` after them."""
    for step in steps:
        needed = end if step.cut is None else step.cut
        if needed != cut:
            moved = reshard(block.shards, x, needed, mask=mask, policy=policy, memory=memory)
            x, cut = moved.wait(), needed
        own = block.shards.take(mask, cut + 1)
        x = getattr(block, step.name)(*step.inputs(x, x if pair is None else pair, own, own))
    return x


def refuse_missing_steps(model: nn.Module) -> None:
    """Check that every Evoformer block has all its steps; each step has a form for shards.

    Raises:
        ConfigError: A block lacks steps, as those of ``mini`` do.
    """
    for block in model.modules():
        if isinstance(block, EvoformerBlock) and len(block.steps()) < len(EVOFORMER_STEPS):
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
        policy, steps = self.msa_transition.policy, self.msa_steps()
        return _run_steps(self, steps, msa, msa_mask, cut=-3, end=-2, policy=policy, memory=memory, pair=pair)

    def _update_pair(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        policy = self.pair_transition.policy
        return _run_steps(self, self.edge_steps(), pair, pair_mask, cut=-2, end=-2, policy=policy)

    def msa_steps(self) -> list[Step]:
        """Return the steps that update the MSA."""
        return [x for x in self.steps() if x.updates == "msa"]

    def edge_steps(self) -> list[Step]:
        """Return the steps that update the pair from the pair alone."""
        return [x for x in self.steps() if x.updates == "pair" and not x.reads_other]


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
        policy = self.pair_transition.policy
        return _run_steps(self, self.steps(), pair, pair_mask, cut=-3, end=-3, policy=policy)


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
