"""Dynamic axial parallelism for an existing network, in any layout of ranks that a plan describes."""

from __future__ import annotations

from torch import nn

from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack, TemplatePairBlock, TemplatePairStack
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.structure.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.parallel.alphafold.axial_blocks import (
    AxialEvoformerBlock,
    AxialEvoformerStack,
    AxialTemplatePairBlock,
    AxialTemplatePairStack,
    refuse_missing_steps,
)
from fastfold.parallel.alphafold.axial_layers import (
    AxialMSARowAttention,
    AxialOuterProductMean,
    AxialTriangleAttention,
    AxialTriangleMultiplication,
)
from fastfold.parallel.alphafold.axial_model import (
    AxialAlphaFold,
    AxialDistogramHead,
    AxialInvariantPointAttention,
)
from fastfold.parallel.alphafold.convert import convert_modules
from fastfold.parallel.alphafold.grid import grid_parallel
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import M

AXIAL_VARIANTS: dict[type[nn.Module], type[nn.Module]] = {
    AlphaFold: AxialAlphaFold,
    EvoformerStack: AxialEvoformerStack,
    EvoformerBlock: AxialEvoformerBlock,
    TemplatePairStack: AxialTemplatePairStack,
    TemplatePairBlock: AxialTemplatePairBlock,
    MSARowAttention: AxialMSARowAttention,
    OuterProductMean: AxialOuterProductMean,
    TriangleAttention: AxialTriangleAttention,
    TriangleMultiplication: AxialTriangleMultiplication,
    InvariantPointAttention: AxialInvariantPointAttention,
    DistogramHead: AxialDistogramHead,
}
"""Variants on shards along one axis."""


def axial_parallel(model: M, mesh: ParallelMesh) -> M:
    """Shard a network, or a part of it, over the mesh's ``dap`` group.

    Each module that communicates becomes its parallel variant (such as :class:`AxialAlphaFold`) with the same
    parameters under the same names. Call it with the same model on every rank of the group, before anything that wraps
    ``forward`` (autocast, compilation) or shards parameters. Afterwards ``torch.compile`` can take those parts of a
    block that :func:`fastfold.parallel.alphafold.convert.silent_parts` returns.

    The ranks of one group need the same features, and for dropout the same state of the random number generator. After
    ``backward`` of the same loss on every rank, a parameter's gradient is the mean over the group: that of DDP and
    FSDP over ``mesh.group("replicas")``, or an all-reduce over ``mesh.group("dap")``.

    The model is an :class:`fastfold.evoformer.model.AlphaFold`, or any of its modules; use only the result afterwards.
    A DAP group of one rank changes nothing.

    Returns:
        The sharded network, which takes over the parameters and hooks of ``model``.

    Raises:
        ConfigError: The model was made parallel before, a ``forward`` was wrapped, or its blocks lack steps (as those
            of ``mini``).
    """
    group = mesh.group("dap")
    if group.size == 1:
        return model
    refuse_missing_steps(model)
    return convert_modules(model, AXIAL_VARIANTS, shards=AxialShards(group))


def shard(model: M, mesh: ParallelMesh) -> M:
    """Share each protein over the mesh's ``dap`` group: along one axis, or on a grid.

    Pass it to :func:`fastfold.parallel.parallelize` as ``dap=``. The plan's ``dap_mode`` selects
    :func:`axial_parallel` or :func:`grid_parallel`.

    Arguments, result and errors are theirs.
    """
    return (grid_parallel if mesh.plan.dap_mode == "grid" else axial_parallel)(model, mesh)
