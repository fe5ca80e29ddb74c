"""The ranks of one protein, in whichever way a plan lays them out."""

from __future__ import annotations

from torch import nn

from fastfold.parallel.alphafold.axial_parallel import axial_parallel
from fastfold.parallel.alphafold.grid_parallel import grid_parallel
from fastfold.parallel.mesh import ParallelMesh


def dap_parallel(model: nn.Module, mesh: ParallelMesh) -> None:
    """Share each protein over the mesh's ``dap`` group, in place: along one axis, or on a grid.

    See :func:`axial_parallel` and :func:`grid_parallel`, of which the plan's ``dap_mode`` takes one.

    Args:
        model: An :class:`fastfold.evoformer.model.AlphaFold` or any of its modules.
        mesh: The ranks; nothing is done where the group is one rank.

    Raises:
        ConfigError: The model was made parallel before, or a ``forward`` was wrapped.
    """
    (grid_parallel if mesh.plan.dap_mode == "grid" else axial_parallel)(model, mesh)
