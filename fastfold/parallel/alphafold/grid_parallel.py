"""The 2D grid put onto a network from outside: blocks of the pair within the stacks, rows of it around them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import BlockStack, EvoformerBlock
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.parallel.alphafold.axial_blocks import AsyncTensor, AxialBlockStack, AxialEvoformerBlock
from fastfold.parallel.alphafold.axial_model import (
    AxialAlphaFold,
    AxialDistogramHead,
    AxialInvariantPointAttention,
)
from fastfold.parallel.alphafold.convert import convert_modules
from fastfold.parallel.alphafold.grid_layers import (
    ATTENTIONS,
    GridLayout,
    GridMSARowAttention,
    GridOuterProductMean,
    GridTriangleAttention,
    GridTriangleMultiplication,
)
from fastfold.parallel.axial.grid import Grid
from fastfold.parallel.axial.grid_matmul import CONTRACTIONS
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.async_ops import Box
from fastfold.parallel.comm.redistribute import redistribute_async
from fastfold.parallel.mesh import ParallelMesh


class GridEvoformerBlock(AxialEvoformerBlock):
    """An Evoformer block on a block of the pair, and on a shard of the MSA as with dynamic axial parallelism."""

    def _update_pair(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        pair = self.triangle_multiplication_outgoing(pair, pair_mask)
        pair = self.triangle_multiplication_incoming(pair, pair_mask)
        pair = self.triangle_attention_starting(pair, pair_mask)
        pair = self.triangle_attention_ending(pair, pair_mask)
        return self.pair_transition(pair)


class GridBlockStack(AxialBlockStack):
    """A stack on blocks of the pair, from and to shards along sequences and rows.

    These are the shards of dynamic axial parallelism, which the rest of the network works on.
    """

    layout: GridLayout

    def forward(self, *state_and_masks: Tensor) -> Any:
        """Run all blocks on ``(msa, pair, msa_mask, pair_mask)`` or ``(pair, pair_mask)``; masks are whole.

        Args:
            state_and_masks: ``msa [*, s, N, c_m]`` and ``pair [*, n, N, c_z]``; ``[*, S, N]`` and ``[*, N, N]``.

        Returns:
            The updated shards.
        """
        if len(state_and_masks) > 2:
            return super().forward(*state_and_masks)
        pair, pair_mask = state_and_masks
        moving = self._entering(pair, pair_mask, inplace=False)
        pair = super().forward(moving.wait(), pair_mask)
        return self._leaving(pair, pair_mask, inplace=False).wait()

    def _entering(self, pair: Tensor, pair_mask: Tensor, *, inplace: bool) -> AsyncTensor:
        rows, blocks = self._layouts(pair_mask.shape[-1])
        return redistribute_async(pair, (-3, -2), rows, blocks, self.layout.grid.whole)

    def _leaving(self, pair: Tensor, pair_mask: Tensor, *, inplace: bool) -> AsyncTensor:
        rows, blocks = self._layouts(pair_mask.shape[-1])
        return redistribute_async(pair, (-3, -2), blocks, rows, self.layout.grid.whole)

    def _layouts(self, length: int) -> tuple[list[Box], list[Box]]:
        """Each rank's rows of the pair, and its block."""
        grid = self.layout.grid
        return [(part, slice(0, length)) for part in grid.whole_slices(length)], grid.boxes((length, length))


_PARALLEL_VARIANTS: dict[type[nn.Module], type[nn.Module]] = {
    BlockStack: GridBlockStack,
    EvoformerBlock: GridEvoformerBlock,
    MSARowAttention: GridMSARowAttention,
    OuterProductMean: GridOuterProductMean,
    TriangleAttention: GridTriangleAttention,
    TriangleMultiplication: GridTriangleMultiplication,
}

# What surrounds the stacks works on shards.
_AXIAL_VARIANTS: dict[type[nn.Module], type[nn.Module]] = {
    AlphaFold: AxialAlphaFold,
    InvariantPointAttention: AxialInvariantPointAttention,
    DistogramHead: AxialDistogramHead,
}


def grid_parallel(
    model: nn.Module, mesh: ParallelMesh, *, contraction: str = "auto", attention: str = "auto"
) -> None:
    """Put the stacks of a network, or a stack, on the mesh's grid of ``dap`` ranks, in place.

    Within the stacks the pair lies in blocks of residues. The MSA, and the pair in the rest of the network, are cut as
    with :func:`fastfold.parallel.alphafold.axial_parallel`, and what is said there about features, dropout and
    gradients holds here: after ``backward`` of the same loss on every rank a parameter's gradient is the mean over
    the group.

    Args:
        model: An :class:`fastfold.evoformer.model.AlphaFold` or any of its modules.
        mesh: The ranks, of a plan with ``dap_mode="grid"``; nothing is done where the group is one rank.
        contraction: How triangles are summed: ``summa``, ``channels`` or ``auto``; see
            :func:`fastfold.parallel.axial.grid_matmul.contract`.
        attention: How rows and columns attend: ``ring``, ``reshard`` or ``auto``; see :class:`GridLayout`.

    Raises:
        ConfigError: The mesh has no grid, there is no such way, the model was made parallel before, or a ``forward``
            was wrapped.
    """
    for name, value, known in (
        ("contraction", contraction, CONTRACTIONS),
        ("attention", attention, ATTENTIONS),
    ):
        if value not in known:
            raise ConfigError(f"grid: {name} is one of {', '.join(known)}, got {value!r}")
    grid = Grid.of(mesh)
    if grid.whole.size == 1:
        return
    layout = GridLayout(grid, contraction, attention)
    convert_modules(
        model, _PARALLEL_VARIANTS | _AXIAL_VARIANTS, layout=layout, shards=AxialShards(grid.whole)
    )
