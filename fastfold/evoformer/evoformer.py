"""Evoformer blocks and stacks (supplement Algorithms 6 and 18), and template pair blocks (Algorithm 16)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.execution import current_call, recomputed
from fastfold.evoformer.msa_attention import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.transition import Transition
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.kernels.common.shared_masks import shared_masks


def is_enabled(node: ConfigDict) -> bool:
    """Return False if a layer's config node says ``enabled: false``."""
    # A missing key makes ``ConfigDict.get`` search for similar ones, which is slow.
    return "enabled" not in node or bool(node["enabled"])


class EvoformerBlock(nn.Module):
    """One Evoformer block: MSA and pair update each other (supplement Algorithm 6, lines 2-10).

    Each step is a residual update, with its layer norm and its dropout:

    - Lines 2-4: the MSA attends along the residues with the pair as bias, then along the sequences, and a transition
      updates each position.
    - Line 5: the outer product mean of the MSA updates the pair; AlphaFold-Multimer has this step first.
    - Lines 6-9: edges of the pair update each other in triangles, by multiplication and by attention.
    - Line 10: a transition updates each edge.

    In the extra MSA stack (Algorithm 18, lines 2-10) the column attention of line 3 is global.

    Column and triangle attention are left out if their nodes say ``enabled: false`` (not in official configurations).

    Example:
        >>> import torch
        >>> from fastfold.evoformer import EvoformerBlock
        >>> from fastfold.evoformer.config import model_config
        >>> node = model_config("model_1").model.embeddings_and_evoformer.evoformer
        >>> block = EvoformerBlock(node, 16, 8)
        >>> msa, pair = block(torch.randn(3, 5, 16), torch.randn(5, 5, 8), torch.ones(3, 5), torch.ones(5, 5))
        >>> msa.shape, pair.shape
        (torch.Size([3, 5, 16]), torch.Size([5, 5, 8]))
    """

    def __init__(
        self, config: ConfigDict, c_m: int, c_z: int, *, global_column: bool = False, zero_init: bool = True
    ) -> None:
        super().__init__()
        column: type[MSAColumnAttention | MSAColumnGlobalAttention]
        column = MSAColumnGlobalAttention if global_column else MSAColumnAttention
        self.outer_product_first: bool = config.outer_product_mean.first
        self.msa_row_attention = MSARowAttention(
            config.msa_row_attention_with_pair_bias, c_m, c_z, zero_init=zero_init
        )
        self.msa_column_attention = (
            column(config.msa_column_attention, c_m, zero_init=zero_init)
            if is_enabled(config.msa_column_attention)
            else None
        )
        self.msa_transition = Transition(config.msa_transition, c_m, zero_init=zero_init)
        self.outer_product_mean = OuterProductMean(config.outer_product_mean, c_m, c_z, zero_init=zero_init)
        self.triangle_multiplication_outgoing = TriangleMultiplication(
            config.triangle_multiplication_outgoing, c_z, zero_init=zero_init
        )
        self.triangle_multiplication_incoming = TriangleMultiplication(
            config.triangle_multiplication_incoming, c_z, zero_init=zero_init
        )
        self.triangle_attention_starting = (
            TriangleAttention(config.triangle_attention_starting_node, c_z, zero_init=zero_init)
            if is_enabled(config.triangle_attention_starting_node)
            else None
        )
        self.triangle_attention_ending = (
            TriangleAttention(config.triangle_attention_ending_node, c_z, zero_init=zero_init)
            if is_enabled(config.triangle_attention_ending_node)
            else None
        )
        self.pair_transition = Transition(config.pair_transition, c_z, zero_init=zero_init)

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the updated ``msa [*, S, N, c_m]`` and ``pair [*, N, N, c_z]``.

        The masks ``msa_mask [*, S, N]`` and ``pair_mask [*, N, N]`` are 0 for padding; without them a ConfigError is
        raised.
        """
        if msa_mask is None or pair_mask is None:
            raise ConfigError("msa_mask and pair_mask must be tensors, found None; give ones without padding")
        if self.outer_product_first:
            pair = self.outer_product_mean(msa, pair, msa_mask)
        msa = self.msa_row_attention(msa, pair, msa_mask)
        if (column := self.msa_column_attention) is not None:
            msa = column(msa, msa_mask)
        msa = self.msa_transition(msa)
        if not self.outer_product_first:
            pair = self.outer_product_mean(msa, pair, msa_mask)
        pair = self.triangle_multiplication_outgoing(pair, pair_mask)
        pair = self.triangle_multiplication_incoming(pair, pair_mask)
        if (starting := self.triangle_attention_starting) is not None:
            pair = starting(pair, pair_mask)
        if (ending := self.triangle_attention_ending) is not None:
            pair = ending(pair, pair_mask)
        pair = self.pair_transition(pair)
        return msa, pair


class TemplatePairBlock(nn.Module):
    """One block of the template pair stack (supplement Algorithm 16, lines 2-6).

    - Lines 2-3: triangle attention around starting and around ending nodes.
    - Lines 4-5: triangle multiplication with outgoing and with incoming edges.
    - Line 6: a transition updates each edge.

    Without ``attention_first``, as for multimers, triangle multiplication precedes triangle attention.
    """

    def __init__(self, config: ConfigDict, c_t: int, *, attention_first: bool, zero_init: bool) -> None:
        super().__init__()
        self.attention_first = attention_first
        self.triangle_attention_starting = TriangleAttention(
            config.triangle_attention_starting_node, c_t, zero_init=zero_init
        )
        self.triangle_attention_ending = TriangleAttention(
            config.triangle_attention_ending_node, c_t, zero_init=zero_init
        )
        self.triangle_multiplication_outgoing = TriangleMultiplication(
            config.triangle_multiplication_outgoing, c_t, zero_init=zero_init
        )
        self.triangle_multiplication_incoming = TriangleMultiplication(
            config.triangle_multiplication_incoming, c_t, zero_init=zero_init
        )
        self.pair_transition = Transition(config.pair_transition, c_t, zero_init=zero_init)

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, N, N, c_t]`` under ``pair_mask [*, N, N]``."""
        if self.attention_first:
            pair = self.triangle_attention_starting(pair, pair_mask)
            pair = self.triangle_attention_ending(pair, pair_mask)
        pair = self.triangle_multiplication_outgoing(pair, pair_mask)
        pair = self.triangle_multiplication_incoming(pair, pair_mask)
        if not self.attention_first:
            pair = self.triangle_attention_starting(pair, pair_mask)
            pair = self.triangle_attention_ending(pair, pair_mask)
        return self.pair_transition(pair)


class BlockStack(nn.Module):
    """Stack of blocks, each recomputed in the backward pass if ``checkpointing`` is set."""

    def __init__(self, blocks: Sequence[nn.Module], *, checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpointing = checkpointing

    def run(self, block: nn.Module, *inputs: Tensor) -> Any:
        """Return ``block(*inputs)``, checkpointed if the stack is."""
        if self.is_checkpointed and torch.is_grad_enabled():
            return recomputed(block, *inputs)
        return block(*inputs)

    @property
    def is_checkpointed(self) -> bool:
        """True if blocks are recomputed: by the settings of the call, else by ``checkpointing``."""
        call = current_call()
        return self.checkpointing if call is None else call.checkpointing


class EvoformerStack(BlockStack):
    """Evoformer blocks one after the other (supplement Algorithm 6, lines 1-11; Algorithm 18).

    Example:
        >>> import torch
        >>> from fastfold.evoformer import EvoformerBlock, EvoformerStack
        >>> from fastfold.evoformer.config import model_config
        >>> node = model_config("model_1").model.embeddings_and_evoformer.evoformer
        >>> stack = EvoformerStack([EvoformerBlock(node, 16, 8) for _ in range(2)])
        >>> msa, pair = stack(torch.randn(3, 5, 16), torch.randn(5, 5, 8), torch.ones(3, 5), torch.ones(5, 5))
        >>> msa.shape, pair.shape
        (torch.Size([3, 5, 16]), torch.Size([5, 5, 8]))
    """

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the updated ``msa`` and ``pair`` after the ``last`` block, from 1; None for all.

        See :meth:`EvoformerBlock.forward`.
        """
        with shared_masks():
            for block in self.blocks[:last]:
                msa, pair = self.run(block, msa, pair, msa_mask, pair_mask)
        return msa, pair


class TemplatePairStack(BlockStack):
    """Template pair blocks one after the other (supplement Algorithm 16, lines 1-7); arguments as of a block."""

    def __init__(self, config: ConfigDict, c_t: int, *, attention_first: bool, zero_init: bool) -> None:
        super().__init__(
            [
                TemplatePairBlock(config, c_t, attention_first=attention_first, zero_init=zero_init)
                for _ in range(config.num_block)
            ]
        )

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, N, N, c_t]`` under ``pair_mask [*, N, N]``."""
        with shared_masks():
            for block in self.blocks:
                pair = self.run(block, pair, pair_mask)
        return pair
