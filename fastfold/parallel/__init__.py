"""Parallel training and inference of any ``nn.Module``: plans, meshes, collectives, layers.

A :class:`ParallelPlan` gives the number of ranks of each axis. A :class:`ParallelMesh` lays the ranks out and provides
groups by name. ``comm.collectives`` are the differentiable exchanges within a :class:`Group`, and ``tensor_parallel``
has the parallel forms of plain layers. No module keeps global state: code that communicates receives its group.
:func:`init_distributed` makes ranks of the processes that torchrun started. :func:`best_plans` finds the fastest
plans: ``best_plans(workload, gpus=512, gpu="h200")``.

``alphafold`` applies dynamic axial parallelism to the networks of :mod:`fastfold.evoformer`:
``parallelize(model, {"dap": 4}, dap=alphafold.shard)``. The other modules do not know these networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.parallel.apply_plan import parallelize
    from fastfold.parallel.comm.groups import CommunicationLog, Group, shard_sizes
    from fastfold.parallel.data_parallel.full_state import ShardFn
    from fastfold.parallel.data_parallel.large_batch import Lamb, Lars
    from fastfold.parallel.data_parallel.optimizer import ParallelOptimizer
    from fastfold.parallel.distributed import DistributedContext, init_distributed
    from fastfold.parallel.mesh import ParallelMesh
    from fastfold.parallel.parallel_model import Parallel
    from fastfold.parallel.pipeline import Pipeline, split_blocks
    from fastfold.parallel.plan import ParallelPlan
    from fastfold.parallel.planner.search import best_plans
    from fastfold.parallel.sequence_parallel.module import SequenceParallel
    from fastfold.parallel.slurm import started_processes

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

# Tensors of several processes, pipelines and tracing import much that most runs do not need.
__getattr__, __dir__ = lazy_names(__name__)
