"""Trace of one training step's operators, messages and memory by region, from a run on tensors without data.

The module runs forward and backward on fake tensors, which have only shapes and dtypes. PyTorch's fake process group
has any number of ranks and sends nothing. So a laptop can trace a block on hundreds of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastfold.errors import ConfigError
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.recorder import Recorder, Trace
from fastfold.utils.module_structure import fakes


@contextmanager
def fake_mesh(plan: ParallelPlan, rank: int = 0) -> Iterator[ParallelMesh]:
    """Create the mesh of a plan with fake ranks in this process; its collectives send nothing.

    The process simulates one rank.

    Raises:
        ConfigError: This process has already joined a real run.
    """
    if dist.is_initialized():
        raise ConfigError("count plans before the processes of a run join each other")
    if plan.ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=plan.ranks, store=FakeStore())
    try:
        yield ParallelMesh(plan)
    finally:
        if plan.ranks > 1:
            dist.destroy_process_group()


def trace(
    build: Callable[[ParallelMesh], nn.Module],
    loss: Callable[[nn.Module], Tensor],
    mesh: ParallelMesh,
    *,
    regions: Sequence[str] = (),
    small: bool = False,
) -> Trace:
    """Record one forward and backward pass of the module that ``build`` makes for this rank.

    ``loss`` runs it on inputs that it creates (they become fake tensors) and returns a scalar. The mesh is from
    :func:`fake_mesh`. The submodules ``regions``, none inside another, are recorded separately. A ``small`` module is
    created with real parameters, because its initialisation reads their values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with nullcontext() if small else mode:
        module = build(mesh)
    if small:
        replaced = fakes(module, mode, mode.from_tensor)  # which keeps the device
        for child in module.modules():
            for table in (child._parameters, child._buffers):
                table.update({name: replaced[id(x)] for name, x in table.items() if x is not None})
    with mode:
        recorder = Recorder(module)
        with mesh.reporter.heard_by(recorder.communicated):
            return recorder.record(loss, regions)
