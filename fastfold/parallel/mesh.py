"""Layout of the ranks of a run by a plan, and the groups in which they communicate."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import CommunicationLog, Group, Reporter, agree_over_store
from fastfold.parallel.plan import ParallelPlan


def _flat(mesh: DeviceMesh, dimensions: tuple[str, ...], name: str) -> DeviceMesh:
    part = mesh[dimensions]
    return part if len(dimensions) == 1 else part._flatten(name)


class ParallelMesh:
    """Groups of ranks by name, on a :class:`DeviceMesh` whose shape is the plan's.

    Neighbouring ranks share a tensor parallel group first, then a DAP, sequence, data parallel group and pipeline
    stage last: groups with the most communication are the closest. Without an initialised process group the mesh has
    one process.

    Groups (see :meth:`group`): ``pp``, ``dp``, ``sp``, ``dap``, ``tp``; ``replicas`` (dp x sp x dap: ranks
    that hold the same parameters); of the 2d and 2.5d grids ``tp_row`` (the ranks of this row, one for each
    column), ``tp_column`` and ``tp_depth``; of the 3d cube ``tp_x``, ``tp_y`` and ``tp_z``; of the grid of the pair
    tensor ``dap_row`` and ``dap_column``; of a plan with ``dp_shard`` also ``dp_shard`` and ``dp_replicate``.

    Args:
        plan: The axes.
        device_type: ``cpu`` or ``cuda``; None for ``cuda`` if the ranks met over NCCL.

    Raises:
        ConfigError: The plan needs another number of ranks, differs between ranks, or has groups of ``tp`` or ``dap``
            on several machines without ``across_machines``. Every rank raises, before any collective.

    Example:
        >>> from fastfold.parallel import ParallelMesh, ParallelPlan
        >>> from fastfold.parallel.planner.fake_run import fake_mesh
        >>> ParallelMesh(ParallelPlan()).group("tp")
        Group(tp, rank 0 of 1)
        >>> with fake_mesh(ParallelPlan(dp=2, tp=4), rank=5) as mesh:  # simulates one of eight ranks
        ...     print(mesh.group("dp"), mesh.group("tp"))
        Group(dp, rank 1 of 2) Group(tp, rank 1 of 4)
    """

    def __init__(self, plan: ParallelPlan, device_type: str | None = None) -> None:
        self.plan = plan
        nccl = dist.is_initialized() and dist.get_backend() == "nccl"
        self.device_type = device_type or ("cuda" if nccl else "cpu")
        self.reporter = Reporter()
        self.device_mesh: DeviceMesh | None = None
        self._stage: DeviceMesh | None = None
        shape = plan.axes
        plan.check_ranks(dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            if dist.get_backend() != "fake":
                plan.check_machines(int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
            facts = {name: repr(value) for name, value in plan.to_dict().items()}
            agree_over_store("plan", facts, "the ranks were started with different plans")
            # An axis of one rank has no messages; groups of single ranks would cost time and memory.
            shape = {name: size for name, size in shape.items() if size > 1}
            if shape:
                self.device_mesh = init_device_mesh(
                    self.device_type, tuple(shape.values()), mesh_dim_names=tuple(shape)
                )
        self._groups: dict[str, Group] = {}
        for name, every in plan.groups.items():
            dimensions, process_group = tuple(dimension for dimension in every if dimension in shape), None
            if self.device_mesh is not None and dimensions:
                process_group = _flat(self.device_mesh, dimensions, name).get_group()
            self._groups[name] = Group(process_group, name, self.reporter)

    def leave(self) -> None:
        """Drop the process groups, which have ended; the groups wait for :meth:`take`."""
        self.device_mesh = self._stage = None
        for group in self._groups.values():
            group.process_group = None

    def take(self, other: ParallelMesh) -> None:
        """Take the process groups of a mesh of the same plan; existing groups of this mesh use them."""
        self.device_mesh, self._stage = other.device_mesh, None
        for name, group in self._groups.items():
            group.process_group = other.group(name).process_group

    def group(self, name: str) -> Group:
        """Return this rank's group ``name``.

        Raises:
            ConfigError: The plan lacks the group.
        """
        if name not in self._groups:
            raise ConfigError(
                f"a mesh of {self.plan} lacks group {name!r}; it has {', '.join(sorted(self._groups))}"
            )
        return self._groups[name]

    def stage(self) -> DeviceMesh | None:
        """Return a mesh of all ranks of this rank's pipeline stage; None for a single rank.

        Without a pipeline the stage is the whole mesh. All ranks call it together: the first call creates a group.
        """
        if self._stage is None and self.device_mesh is not None:
            dimensions = tuple(name for name in self.device_mesh.mesh_dim_names or () if name != "pp")
            if dimensions:
                self._stage = _flat(self.device_mesh, dimensions, "stage")
        return self._stage

    def record(self) -> AbstractContextManager[CommunicationLog]:
        """Log this rank's messages over all groups of the mesh inside the context."""
        return self.reporter.record()
