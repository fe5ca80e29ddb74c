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
    """Some consecutive blocks of a stack, which keep the stack's form (sharded, recomputed).

    Args:
        stack: The whole stack.
        blocks: Those of this stage.
    """

    def __init__(self, stack: BlockStack, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stack = copy.copy(stack)
        self.stack._modules = {"blocks": nn.ModuleList(blocks)}

    def forward(self, *state: Tensor, masks: Sequence[Tensor]) -> Any:
        """The state after these blocks.

        Args:
            state: ``msa [*, S, N, c_m]`` and ``pair [*, N, N, c_z]``, or ``pair`` alone; with ``dap`` shards.
            masks: ``(msa_mask, pair_mask)`` or ``(pair_mask,)``, whole; given to every stage, not sent.
        """
        return self.stack(*state, *masks)


def stack_stages(stack: nn.Module, count: int) -> list[nn.Module]:
    """A stack as pipeline stages with equally many blocks, the first ones one more.

    Args:
        stack: A :class:`fastfold.evoformer.evoformer.BlockStack`, for example a network's ``evoformer``.
        count: How many stages.

    Raises:
        ConfigError: It is not a stack, or has fewer blocks.
    """
    if not isinstance(stack, BlockStack):
        raise ConfigError(f"{type(stack).__name__} is not a stack of blocks")
    return [StackStage(stack, blocks) for blocks in split_blocks(list(stack.blocks), count)]
