"""The 2D grid for an existing network: blocks of the pair within the stacks, rows of it outside."""

from __future__ import annotations

from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack, TemplatePairStack
from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.structure.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.parallel.alphafold.axial_blocks import (
    AxialEvoformerStack,
    ShardedEvoformerBlock,
    refuse_missing_steps,
)
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
from fastfold.parallel.comm.async_ops import AsyncResult, Box
from fastfold.parallel.comm.collectives import redistribute_async
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import M


class GridEvoformerBlock(ShardedEvoformerBlock):
    """An Evoformer block on a block of the pair, and on a shard of the MSA as with dynamic axial parallelism."""

    def _update_pair(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        for step in self.edge_steps():
            pair = getattr(self, step.name)(*step.inputs(pair, pair, pair_mask, pair_mask))
        return pair


class GridEvoformerStack(AxialEvoformerStack):
    """Evoformer blocks on blocks of the pair; inputs and results are shards along sequences and rows.

    These are the shards of dynamic axial parallelism, which the rest of the network uses.
    """

    layout: GridLayout

    def _entering(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        return rows_to_blocks(self.layout.grid, pair, pair_mask.shape[-1])

    def _leaving(self, pair: Tensor, pair_mask: Tensor, policy: ExecutionPolicy) -> AsyncResult[Tensor]:
        return blocks_to_rows(self.layout.grid, pair, pair_mask.shape[-1])


class GridTemplatePairStack(TemplatePairStack):
    """Template blocks on blocks of the pair; input and result are shards along its rows."""

    layout: GridLayout

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, n, N, c_t]`` under the whole ``pair_mask [*, N, N]``."""
        grid, length = self.layout.grid, pair_mask.shape[-1]
        pair = super().forward(rows_to_blocks(grid, pair, length).wait(), pair_mask)
        return blocks_to_rows(grid, pair, length).wait()


def rows_to_blocks(grid: Grid, pair: Tensor, length: int) -> AsyncResult[Tensor]:
    """Start moving a shard ``[*, n, N, c]`` of the pair along its rows to this rank's block of it."""
    return redistribute_async(pair, (-3, -2), _rows(grid, length), grid.boxes((length, length)), grid.whole)


def blocks_to_rows(grid: Grid, pair: Tensor, length: int) -> AsyncResult[Tensor]:
    """Start moving this rank's block of the pair back to a shard along its rows."""
    return redistribute_async(pair, (-3, -2), grid.boxes((length, length)), _rows(grid, length), grid.whole)


def _rows(grid: Grid, length: int) -> list[Box]:
    return [(part, slice(0, length)) for part in grid.whole_slices(length)]


_PARALLEL_VARIANTS: dict[type[nn.Module], type[nn.Module]] = {
    EvoformerStack: GridEvoformerStack,
    EvoformerBlock: GridEvoformerBlock,
    TemplatePairStack: GridTemplatePairStack,
    MSARowAttention: GridMSARowAttention,
    OuterProductMean: GridOuterProductMean,
    TriangleAttention: GridTriangleAttention,
    TriangleMultiplication: GridTriangleMultiplication,
}

# Modules outside the stacks work on shards.
_AXIAL_VARIANTS: dict[type[nn.Module], type[nn.Module]] = {
    AlphaFold: AxialAlphaFold,
    InvariantPointAttention: AxialInvariantPointAttention,
    DistogramHead: AxialDistogramHead,
}


def grid_parallel(model: M, mesh: ParallelMesh, *, contraction: str = "auto", attention: str = "auto") -> M:
    """Shard the stacks of a network, or one stack, over the mesh's grid of ``dap`` ranks.

    Within the stacks the pair is cut into blocks of residues. The MSA, and the pair in the rest of the network, are
    cut as by :func:`fastfold.parallel.alphafold.axial_parallel`. The same rules hold for features, dropout and
    gradients: after ``backward`` of the same loss on every rank, a parameter's gradient is the mean over the group.

    Args:
        model: An :class:`fastfold.evoformer.model.AlphaFold` or any of its modules; use only the result afterwards.
        mesh: The ranks, of a plan with ``dap_mode="grid"``; a group of one rank changes nothing.
        contraction: Method of triangle sums: ``summa``, ``channels`` or ``auto``; see
            :func:`fastfold.parallel.axial.grid_matmul.contract`.
        attention: Method of attention within rows and columns: ``ring``, ``reshard`` or ``auto``; see
            :class:`GridLayout`.

    Returns:
        The sharded network, which takes over the parameters and hooks of ``model``.

    Raises:
        ConfigError: The mesh has no grid, a method is unknown, the model was made parallel before, a ``forward``
            was wrapped, or blocks lack steps (as those of ``mini``).
    """
    for name, value, known in (
        ("contraction", contraction, CONTRACTIONS),
        ("attention", attention, ATTENTIONS),
    ):
        if value not in known:
            raise ConfigError(f"grid: {name}: expected one of {', '.join(known)}, found {value!r}")
    grid = Grid.of(mesh)
    if grid.whole.size == 1:
        return model
    refuse_missing_steps(model)
    layout = GridLayout(grid, contraction, attention)
    return convert_modules(
        model, _PARALLEL_VARIANTS | _AXIAL_VARIANTS, layout=layout, shards=AxialShards(grid.whole)
    )
