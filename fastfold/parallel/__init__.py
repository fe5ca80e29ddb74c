"""Parallel training and inference of any ``nn.Module``: plans, meshes, collectives, layers.

A :class:`ParallelPlan` says over how many ranks what is split, a :class:`ParallelMesh` lays the ranks out and gives
groups by name, ``collectives`` are the differentiable exchanges within a :class:`Group`, and ``tensor_parallel``
the layers that are made of plain ones. Nothing is kept in a module: whoever communicates is handed a group.

Which plan is the fastest says :func:`best_plans`: ``best_plans(workload, gpus=512, gpu="h200")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastfold.parallel.comm.groups import CommunicationLog, Group, shard_sizes
from fastfold.parallel.distributed import DistributedContext, init_distributed
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.parallel_model import Parallel
from fastfold.parallel.parallelize import parallelize
from fastfold.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from fastfold.parallel.planner.search import best_plans

__all__ = [
    "CommunicationLog",
    "DistributedContext",
    "Group",
    "Parallel",
    "ParallelMesh",
    "ParallelPlan",
    "best_plans",
    "init_distributed",
    "parallelize",
    "shard_sizes",
]


def __getattr__(name: str) -> Any:
    # Tracing on tensors without data brings in a large part of PyTorch, which no training run needs.
    if name == "best_plans":
        from fastfold.parallel.planner.search import best_plans

        return best_plans
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
