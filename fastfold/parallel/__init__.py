"""Parallel training and inference of any ``nn.Module``: plans, meshes, collectives, layers.

A :class:`ParallelPlan` says over how many ranks what is split, a :class:`ParallelMesh` lays the ranks out and gives
groups by name, ``collectives`` are the differentiable exchanges within a :class:`Group`, and ``tensor_parallel``
the layers that are made of plain ones. Nothing is kept in a module: whoever communicates is handed a group.
"""

from fastfold.parallel.groups import CommunicationLog, Group, shard_sizes
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.parallel_model import Parallel
from fastfold.parallel.parallelize import parallelize
from fastfold.parallel.plan import ParallelPlan

__all__ = [
    "CommunicationLog",
    "Group",
    "Parallel",
    "ParallelMesh",
    "ParallelPlan",
    "parallelize",
    "shard_sizes",
]
