"""The 2D grid put onto a network from outside: blocks of the pair within the stacks, rows of it around them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import BlockStack
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.msa_attention import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.parallel.alphafold.axial_network import (
    AxialAlphaFold,
    AxialDistogramHead,
    AxialInvariantPointAttention,
)
from fastfold.parallel.alphafold.forms import take_forms
from fastfold.parallel.alphafold.grid_steps import (
    ATTENTIONS,
    GridLayout,
    GridMSAColumnAttention,
    GridMSAColumnGlobalAttention,
    GridMSARowAttention,
    GridOuterProductMean,
    GridTriangleAttention,
    GridTriangleMultiplication,
)
from fastfold.parallel.axial import AxialShards
from fastfold.parallel.exchange import Box
from fastfold.parallel.grid import Grid
from fastfold.parallel.grid_product import CONTRACTIONS
from fastfold.parallel.groups import shard_slices
from fastfold.parallel.handle import Handle
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.redistribute import redistribute_async


class GridBlockStack(BlockStack):
    """A stack on blocks of the grid, from and to shards along sequences and rows.

    These are the shards of dynamic axial parallelism, which the rest of the network works on.
    """

    layout: GridLayout

    def forward(self, *state_and_masks: Tensor) -> Any:
        """Run all blocks on shards ``(msa, pair, msa_mask, pair_mask)`` or ``(pair, pair_mask)``; masks are whole.

        Args:
            state_and_masks: ``msa [*, s, N, c_m]`` and ``pair [*, n, N, c_z]``; ``[*, S, N]`` and ``[*, N, N]``.

        Returns:
            The updated shards.
        """
        count = len(state_and_masks) // 2
        state, masks = state_and_masks[:count], state_and_masks[count:]
        started = [self._move(x, mask, to_blocks=True) for x, mask in zip(state, masks, strict=True)]
        result = super().forward(*[handle.wait() for handle in started], *masks)
        found = result if count > 1 else (result,)
        ended = [self._move(x, mask, to_blocks=False) for x, mask in zip(found, masks, strict=True)]
        updated = tuple(handle.wait() for handle in ended)
        return updated if count > 1 else updated[0]

    def _move(self, x: Tensor, mask: Tensor, *, to_blocks: bool) -> Handle:
        """Start moving one representation from shards along its first axis to blocks, or back."""
        grid = self.layout.grid
        rows, length = mask.shape[-2:]
        shards: list[Box] = [(part, slice(0, length)) for part in shard_slices(rows, grid.whole.size)]
        blocks = grid.boxes((rows, length))
        source, target = (shards, blocks) if to_blocks else (blocks, shards)
        return redistribute_async(x, (-3, -2), source, target, grid.whole)


_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    BlockStack: GridBlockStack,
    MSARowAttention: GridMSARowAttention,
    MSAColumnAttention: GridMSAColumnAttention,
    MSAColumnGlobalAttention: GridMSAColumnGlobalAttention,
    OuterProductMean: GridOuterProductMean,
    TriangleAttention: GridTriangleAttention,
    TriangleMultiplication: GridTriangleMultiplication,
}

# What surrounds the stacks works on shards.
_AXIAL_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    AlphaFold: AxialAlphaFold,
    InvariantPointAttention: AxialInvariantPointAttention,
    DistogramHead: AxialDistogramHead,
}


def grid_parallel(
    model: nn.Module, mesh: ParallelMesh, *, contraction: str = "auto", attention: str = "auto"
) -> None:
    """Put the stacks of a network, or a stack, on the mesh's grid of ``dap`` ranks, in place.

    Within the stacks the pair lies in blocks of residues and the MSA in blocks of sequences and residues. The rest of
    the network works on rows of the pair and sequences of the MSA, as with
    :func:`fastfold.parallel.alphafold.axial_parallel`, and what is said there about features, dropout and gradients
    holds here: after ``backward`` of the same loss on every rank a parameter's gradient is the mean over the group.

    Args:
        model: An :class:`fastfold.evoformer.model.AlphaFold` or any of its modules.
        mesh: The ranks, of a plan with ``dap_mode="grid"``; nothing is done where the group is one rank.
        contraction: How triangles are summed: ``summa``, ``channels`` or ``auto``; see
            :func:`fastfold.parallel.grid_product.contract`.
        attention: How rows and columns attend: ``ring``, ``switch`` or ``auto``; see :class:`GridLayout`.

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
    take_forms(model, _FORMS | _AXIAL_FORMS, layout=layout, shards=AxialShards(grid.whole))
