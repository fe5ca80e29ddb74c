"""The network's block stacks as pipeline stages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import BlockStack
from fastfold.parallel.pipeline import split_blocks


class StackStage(nn.Module):
    """Consecutive blocks of a stack, sharded and recomputed as the stack is.

    Args:
        stack: The whole stack.
        blocks: Blocks of this stage.
    """

    def __init__(self, stack: BlockStack, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stack = copy.copy(stack)
        self.stack._modules = {"blocks": nn.ModuleList(blocks)}

    def forward(self, *state: Tensor, masks: Sequence[Tensor]) -> Any:
        """Run the blocks of this stage.

        Args:
            state: ``msa [*, S, N, c_m]`` and ``pair [*, N, N, c_z]``, or ``pair`` alone; with ``dap`` shards.
            masks: ``(msa_mask, pair_mask)`` or ``(pair_mask,)``, whole; given to every stage, not sent.
        """
        return self.stack(*state, *masks)


def stack_stages(stack: nn.Module, count: int) -> list[nn.Module]:
    """Split a stack into pipeline stages of equal numbers of blocks; a remainder goes to the first.

    Args:
        stack: A :class:`fastfold.evoformer.evoformer.BlockStack`, for example a network's ``evoformer``.
        count: Number of stages.

    Raises:
        ConfigError: It is not a stack, or has fewer blocks than stages.
    """
    if not isinstance(stack, BlockStack):
        raise ConfigError(f"expected a stack of blocks, found {type(stack).__name__}")
    return [StackStage(stack, blocks) for blocks in split_blocks(list(stack.blocks), count)]
