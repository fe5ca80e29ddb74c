"""Parallel training and inference of any ``nn.Module``: plans, meshes, collectives, layers.

A :class:`ParallelPlan` says over how many ranks what is split, a :class:`ParallelMesh` lays the ranks out and gives
groups by name, ``comm.collectives`` are the differentiable exchanges within a :class:`Group`, and ``tensor_parallel``
the layers that are made of plain ones. No module keeps state: whoever communicates is handed a group.
:func:`init_distributed` makes the ranks out of the processes that torchrun started, and :func:`best_plans` says which
plan is the fastest: ``best_plans(workload, gpus=512, gpu="h200")``.

``alphafold`` puts dynamic axial parallelism onto the networks of :mod:`fastfold.evoformer`:
``parallelize(model, {"dap": 4}, dap=alphafold.shard)``. Nothing else here knows these networks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastfold.parallel.apply_plan import parallelize
from fastfold.parallel.comm.groups import CommunicationLog, Group, shard_sizes
from fastfold.parallel.data_parallel.full_state import ShardFn
from fastfold.parallel.data_parallel.large_batch import Lamb, Lars
from fastfold.parallel.data_parallel.optimizer import ParallelOptimizer
from fastfold.parallel.distributed import DistributedContext, init_distributed, started_processes
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.parallel_model import Parallel
from fastfold.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from fastfold.parallel.pipeline import Pipeline, split_blocks
    from fastfold.parallel.planner.search import best_plans
    from fastfold.parallel.sequence_parallel.module import SequenceParallel

# Pipelines, operators, and tracing on tensors without data bring in much that most runs do not need.
_LAZY = {
    "Pipeline": "fastfold.parallel.pipeline",
    "SequenceParallel": "fastfold.parallel.sequence_parallel.module",
    "best_plans": "fastfold.parallel.planner.search",
    "split_blocks": "fastfold.parallel.pipeline",
}

__all__ = [
    "CommunicationLog",
    "DistributedContext",
    "Group",
    "Lamb",
    "Lars",
    "Parallel",
    "ParallelMesh",
    "ParallelOptimizer",
    "ParallelPlan",
    "Pipeline",
    "SequenceParallel",
    "ShardFn",
    "best_plans",
    "init_distributed",
    "parallelize",
    "shard_sizes",
    "split_blocks",
    "started_processes",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
