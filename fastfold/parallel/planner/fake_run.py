"""Trace of one training step's operators, messages and memory, from a run on tensors without data.

The module runs forward and backward on fake tensors, which have only shapes and dtypes. PyTorch's fake process group
has any number of ranks and sends nothing. So a laptop can trace a block on hundreds of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastfold.errors import ConfigError
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.trace import Listened, Recorder, Trace


@contextmanager
def fake_mesh(plan: ParallelPlan, rank: int = 0) -> Iterator[ParallelMesh]:
    """Create the mesh of a plan with fake ranks in this process; its collectives send nothing.

    The process simulates one rank.

    Raises:
        ConfigError: This process has already joined a real run.
    """
    if dist.is_initialized():
        raise ConfigError("count plans before the processes of a run join each other")
    if plan.ranks == 1:
        yield ParallelMesh(plan)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=plan.ranks, store=FakeStore())
    try:
        yield ParallelMesh(plan)
    finally:
        dist.destroy_process_group()


def make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace parameters and buffers by tensors without data, in place; shared ones stay shared."""
    made: dict[int, Any] = {}

    def fake(x: Tensor) -> Any:
        if id(x) not in made:
            bare = mode.from_tensor(x.detach())
            made[id(x)] = (
                nn.Parameter(bare, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else bare
            )
        return made[id(x)]

    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, x in table.items():
                if x is not None:
                    table[name] = fake(x)


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
    with mode:
        if small:
            make_fake(module, mode)
        recorder = Recorder(module)
        handles = [hook for name in regions for hook in recorder.watch(name, module.get_submodule(name))]
        try:
            with mesh.record() as log:
                log.entries = Listened(recorder.communicated)
                with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda x: x):
                    loss(module).backward()
        finally:
            for handle in handles:
                handle.remove()
    return recorder.result()
