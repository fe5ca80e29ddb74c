"""Evoformer blocks and stacks (supplement Algorithms 6 and 18), and template pair blocks (Algorithm 16)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastfold.evoformer.execution import LayerSizes, PolicyModule, current_call, recomputed
from fastfold.evoformer.msa_attention import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.transition import Transition
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication


class Step(NamedTuple):
    """Step of a block, in which a layer updates the MSA or the pair."""

    name: str  #: Name of the layer in the block
    layer: type[PolicyModule]  #: Class of the layer
    updates: str  #: ``msa`` or ``pair``
    #: Axis along which ranks can cut the updated tensor: -3 (sequences, rows), -2 (residues, columns), or None for any
    cut: int | None = None
    reads_other: bool = False  #: True if the layer also reads the other tensor
    #: Name of the layer's node in the block's official config node; None for ``name``
    node: str | None = None

    def inputs(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the layer's arguments, of ``msa [*, S, N, c_m]``, ``pair [*, N, N, c_z]`` and their masks."""
        if self.reads_other:
            return msa, pair, msa_mask
        x, mask = (msa, msa_mask) if self.updates == "msa" else (pair, pair_mask)
        return (x,) if self.layer is Transition else (x, mask)

    def node_of(self, config: Any) -> Any:
        """Return the layer's node of a block's config node; None if it says ``enabled: false``."""
        node = config[self.node or self.name]
        # A missing key makes ``ConfigDict.get`` search for similar ones, which is slow.
        return node if "enabled" not in node or node["enabled"] else None

    def layer_of(self, *, global_column: bool) -> type[PolicyModule]:
        """Return the layer's class in a block with global column attention, or without."""
        return MSAColumnGlobalAttention if global_column and self.layer is MSAColumnAttention else self.layer

    def flops(self, config: Any, sizes: LayerSizes, *, global_column: bool = False) -> float:
        """Return the operations of the layer's matrix products."""
        node = self.node_of(config)
        if node is None:
            return 0.0
        rows, channels = (
            (sizes.sequences, sizes.c_m) if self.updates == "msa" else (sizes.residues, sizes.c_z)
        )
        layer = self.layer_of(global_column=global_column)
        return layer.flops(node, sizes, (rows, sizes.residues, channels))

    def build(
        self, config: Any, c_m: int, c_z: int, *, global_column: bool, zero_init: bool
    ) -> nn.Module | None:
        """Return the layer of a block; None if its config node says ``enabled: false``."""
        node = self.node_of(config)
        if node is None:
            return None
        channels = (c_m, c_z) if self.reads_other else (c_m if self.updates == "msa" else c_z,)
        return self.layer_of(global_column=global_column)(node, *channels, zero_init=zero_init)


_MULTIPLICATION = (
    Step("triangle_multiplication_outgoing", TriangleMultiplication, "pair", cut=-2),
    Step("triangle_multiplication_incoming", TriangleMultiplication, "pair", cut=-3),
)
_ATTENTION = tuple(
    Step(name, TriangleAttention, "pair", cut=cut, node=f"{name}_node")
    for name, cut in (("triangle_attention_starting", -3), ("triangle_attention_ending", -2))
)
_OUTER_PRODUCT = Step("outer_product_mean", OuterProductMean, "pair", reads_other=True)
_PAIR_TRANSITION = Step("pair_transition", Transition, "pair")
_ROW_NODE = "msa_row_attention_with_pair_bias"
EVOFORMER_STEPS = (
    Step("msa_row_attention", MSARowAttention, "msa", cut=-3, reads_other=True, node=_ROW_NODE),
    Step("msa_column_attention", MSAColumnAttention, "msa", cut=-2),
    Step("msa_transition", Transition, "msa"),
    _OUTER_PRODUCT,
    *_MULTIPLICATION,
    *_ATTENTION,
    _PAIR_TRANSITION,
)
"""Steps of an Evoformer block in the order of supplement Algorithm 6."""
TEMPLATE_STEPS = (*_ATTENTION, *_MULTIPLICATION, _PAIR_TRANSITION)
"""Steps of a template block of the monomer network in the order of Algorithm 16."""


class EvoformerBlock(nn.Module):
    """One Evoformer block: MSA and pair update each other (supplement Algorithm 6, lines 2-10).

    Each step is a residual update, with its layer norm and its dropout:

    - Lines 2-4: the MSA attends along the residues with the pair as bias, then along the sequences, and a transition
      updates each position.
    - Line 5: the outer product mean of the MSA updates the pair; AlphaFold-Multimer has this step first.
    - Lines 6-9: edges of the pair update each other in triangles, by multiplication and by attention.
    - Line 10: a transition updates each edge.

    In the extra MSA stack (Algorithm 18, lines 2-10) the column attention of line 3 is global.

    Steps are left out if their nodes say ``enabled: false`` (not in official configurations).

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

    msa_transition: Transition
    outer_product_mean: OuterProductMean
    pair_transition: Transition

    def __init__(
        self, config: Any, c_m: int, c_z: int, *, global_column: bool = False, zero_init: bool = True
    ) -> None:
        super().__init__()
        self.outer_product_first = config.outer_product_mean.first
        for step in EVOFORMER_STEPS:
            layer = step.build(config, c_m, c_z, global_column=global_column, zero_init=zero_init)
            setattr(self, step.name, layer)

    def steps(self) -> list[Step]:
        """Return the steps of this block in their order."""
        first = (_OUTER_PRODUCT,) if self.outer_product_first else ()
        steps = first + tuple(x for x in EVOFORMER_STEPS if x not in first)
        return [x for x in steps if getattr(self, x.name) is not None]

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the updated ``msa [*, S, N, c_m]`` and ``pair [*, N, N, c_z]``.

        The masks ``msa_mask [*, S, N]`` and ``pair_mask [*, N, N]`` are 0 for padding.
        """
        for step in self.steps():
            updated = getattr(self, step.name)(*step.inputs(msa, pair, msa_mask, pair_mask))
            msa, pair = (updated, pair) if step.updates == "msa" else (msa, updated)
        return msa, pair


class TemplatePairBlock(nn.Module):
    """One block of the template pair stack (supplement Algorithm 16, lines 2-6).

    - Lines 2-3: triangle attention around starting and around ending nodes.
    - Lines 4-5: triangle multiplication with outgoing and with incoming edges.
    - Line 6: a transition updates each edge.

    With ``attention_first``, as for monomers, triangle attention precedes triangle multiplication.
    """

    pair_transition: Transition

    def __init__(self, config: Any, c_t: int, *, attention_first: bool, zero_init: bool) -> None:
        super().__init__()
        self.attention_first = attention_first
        for step in TEMPLATE_STEPS:
            setattr(self, step.name, step.build(config, c_t, c_t, global_column=False, zero_init=zero_init))

    def steps(self) -> list[Step]:
        """Return the steps of this block in their order."""
        triangles = _ATTENTION + _MULTIPLICATION if self.attention_first else _MULTIPLICATION + _ATTENTION
        return [*triangles, _PAIR_TRANSITION]

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, N, N, c_t]`` under ``pair_mask [*, N, N]``."""
        for step in self.steps():
            pair = getattr(self, step.name)(*step.inputs(pair, pair, pair_mask, pair_mask))
        return pair


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
        for block in self.blocks[:last]:
            msa, pair = self.run(block, msa, pair, msa_mask, pair_mask)
        return msa, pair


class TemplatePairStack(BlockStack):
    """Template pair blocks one after the other (supplement Algorithm 16, lines 1-7); arguments as of a block."""

    def __init__(self, config: Any, c_t: int, *, attention_first: bool, zero_init: bool) -> None:
        blocks = range(config.num_block)
        how: dict[str, Any] = {"attention_first": attention_first, "zero_init": zero_init}
        super().__init__([TemplatePairBlock(config, c_t, **how) for _ in blocks])

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, N, N, c_t]`` under ``pair_mask [*, N, N]``."""
        for block in self.blocks:
            pair = self.run(block, pair, pair_mask)
        return pair
