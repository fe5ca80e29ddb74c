"""Dynamic axial parallelism for an existing network: shards along one axis, or a grid with blocks of the pair."""

from __future__ import annotations

from torch import nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack, TemplatePairBlock, TemplatePairStack
from fastfold.evoformer.heads import DistogramHead
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.structure.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.parallel.alphafold import axial_blocks, axial_layers, axial_model, grid_layers
from fastfold.parallel.alphafold.convert import convert_modules
from fastfold.parallel.axial.grid import CONTRACTIONS, Grid
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import M

_OUTSIDE: dict[type[nn.Module], type[nn.Module]] = {
    AlphaFold: axial_model.AxialAlphaFold,
    InvariantPointAttention: axial_model.AxialInvariantPointAttention,
    DistogramHead: axial_model.AxialDistogramHead,
}
"""Variants of modules outside the stacks, which work on shards in both modes."""

AXIAL_VARIANTS: dict[type[nn.Module], type[nn.Module]] = _OUTSIDE | {
    EvoformerStack: axial_blocks.AxialEvoformerStack,
    EvoformerBlock: axial_blocks.AxialEvoformerBlock,
    TemplatePairStack: axial_blocks.AxialTemplatePairStack,
    TemplatePairBlock: axial_blocks.AxialTemplatePairBlock,
    MSARowAttention: axial_layers.AxialMSARowAttention,
    OuterProductMean: axial_layers.AxialOuterProductMean,
    TriangleAttention: axial_layers.AxialTriangleAttention,
    TriangleMultiplication: axial_layers.AxialTriangleMultiplication,
}
"""Variants on shards along one axis."""

_GRID_VARIANTS: dict[type[nn.Module], type[nn.Module]] = _OUTSIDE | {
    EvoformerStack: grid_layers.GridEvoformerStack,
    EvoformerBlock: grid_layers.GridEvoformerBlock,
    TemplatePairStack: grid_layers.GridTemplatePairStack,
    MSARowAttention: grid_layers.GridMSARowAttention,
    OuterProductMean: grid_layers.GridOuterProductMean,
    TriangleAttention: grid_layers.GridTriangleAttention,
    TriangleMultiplication: grid_layers.GridTriangleMultiplication,
}


def axial_parallel(model: M, mesh: ParallelMesh) -> M:
    """Shard a network, or a part of it, over the mesh's ``dap`` group.

    Each module that communicates becomes its variant in :data:`AXIAL_VARIANTS` with the same parameters under the same
    names. Call it with the same model on every rank of the group, before anything that wraps ``forward`` (autocast,
    compilation) or shards parameters. Afterwards ``torch.compile`` can take those parts of a block that
    :func:`fastfold.parallel.alphafold.convert.silent_parts` returns.

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

    Example:
        >>> import torch
        >>> from fastfold import ParallelPlan, model_config
        >>> from fastfold.evoformer import EvoformerBlock, EvoformerStack
        >>> from fastfold.parallel.alphafold import axial_parallel
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> config = model_config("model_1").model.embeddings_and_evoformer.evoformer
        >>> msa, pair = torch.randn(8, 12, 32), torch.randn(12, 12, 16)
        >>> with fake_mesh(ParallelPlan(dap=4)) as mesh, torch.no_grad():  # simulates one of four ranks
        ...     stack = axial_parallel(EvoformerStack([EvoformerBlock(config, 32, 16)]), mesh)
        ...     msa, pair = stack(msa[:2], pair[:3], torch.ones(8, 12), torch.ones(12, 12))
        >>> msa.shape, pair.shape  # two of eight sequences, and three of the twelve rows of the pair
        (torch.Size([2, 12, 32]), torch.Size([3, 12, 16]))
    """
    group = mesh.group("dap")
    if group.size == 1:
        return model
    axial_blocks.refuse_missing_steps(model)
    return convert_modules(model, AXIAL_VARIANTS, shards=AxialShards(group))


def grid_parallel(model: M, mesh: ParallelMesh, *, contraction: str = "auto", attention: str = "auto") -> M:
    """Shard the stacks of a network, or one stack, over the mesh's grid of ``dap`` ranks.

    Within the stacks the pair is cut into blocks of residues. The MSA, and the pair in the rest of the network, are
    cut as by :func:`fastfold.parallel.alphafold.axial_parallel`. The same rules hold for features, dropout and
    gradients: after ``backward`` of the same loss on every rank, a parameter's gradient is the mean over the group.

    Args:
        model: An :class:`fastfold.evoformer.model.AlphaFold` or any of its modules; use only the result afterwards.
        mesh: The ranks, of a plan with ``dap_mode="grid"``; a group of one rank changes nothing.
        contraction: Method of triangle sums: ``summa``, ``channels`` or ``auto``; see
            :func:`fastfold.parallel.axial.grid.contract`.
        attention: Method of attention within rows and columns: ``ring``, ``reshard`` or ``auto``; see
            :class:`~.grid_layers.GridLayout`.

    Returns:
        The sharded network, which takes over the parameters and hooks of ``model``.

    Raises:
        ConfigError: The mesh has no grid, a method is unknown, the model was made parallel before, a ``forward``
            was wrapped, or blocks lack steps (as those of ``mini``).

    Example:
        >>> import torch
        >>> from fastfold import ParallelPlan, model_config
        >>> from fastfold.evoformer import EvoformerBlock, EvoformerStack
        >>> from fastfold.parallel.alphafold import grid_parallel
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> config = model_config("model_1").model.embeddings_and_evoformer.evoformer
        >>> msa, pair = torch.randn(8, 12, 32), torch.randn(12, 12, 16)
        >>> plan = ParallelPlan(dap=4, dap_mode="grid")
        >>> with fake_mesh(plan) as mesh, torch.no_grad():  # simulates one of 2 x 2 ranks
        ...     stack = grid_parallel(EvoformerStack([EvoformerBlock(config, 32, 16)]), mesh)
        ...     msa, pair = stack(msa[:2], pair[:3], torch.ones(8, 12), torch.ones(12, 12))
        >>> msa.shape, pair.shape  # two of eight sequences, and three of the twelve rows of the pair
        (torch.Size([2, 12, 32]), torch.Size([3, 12, 16]))
    """
    for name, value, known in (
        ("contraction", contraction, CONTRACTIONS),
        ("attention", attention, grid_layers.ATTENTIONS),
    ):
        if value not in known:
            raise ConfigError(f"grid: {name}: expected one of {', '.join(known)}, found {value!r}")
    grid = Grid.of(mesh)
    if grid.whole.size == 1:
        return model
    axial_blocks.refuse_missing_steps(model)
    layout = grid_layers.GridLayout(grid, contraction, attention)
    return convert_modules(model, _GRID_VARIANTS, layout=layout, shards=AxialShards(grid.whole))


def shard(model: M, mesh: ParallelMesh) -> M:
    """Share each protein over the mesh's ``dap`` group: along one axis, or on a grid.

    Pass it to :func:`fastfold.parallel.parallelize` as ``dap=``. The plan's ``dap_mode`` selects
    :func:`axial_parallel` or :func:`grid_parallel`.

    Arguments, result and errors are theirs.

    Example:
        >>> from fastfold import ParallelPlan, model_config
        >>> from fastfold.evoformer import EvoformerBlock, EvoformerStack
        >>> from fastfold.parallel import alphafold
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> config = model_config("model_1").model.embeddings_and_evoformer.evoformer
        >>> for mode in ("axial", "grid"):
        ...     stack = EvoformerStack([EvoformerBlock(config, 32, 16)])
        ...     with fake_mesh(ParallelPlan(dap=4, dap_mode=mode)) as mesh:  # simulates one of four ranks
        ...         print(type(alphafold.shard(stack, mesh)).__name__)
        AxialEvoformerStack
        GridEvoformerStack
    """
    return (grid_parallel if mesh.plan.dap_mode == "grid" else axial_parallel)(model, mesh)
