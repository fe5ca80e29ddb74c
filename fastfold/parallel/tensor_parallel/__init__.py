"""Layers that are split over the ranks of a tensor parallel group: 1d, 2d, 2.5d and 3d."""

from fastfold.parallel.tensor_parallel.layers import (
    ParallelAttention,
    ParallelEmbedding,
    ParallelLayerNorm,
    ParallelMLP,
)
from fastfold.parallel.tensor_parallel.layout import Layout, Partition, layouts, parameter_shard_specs
from fastfold.parallel.tensor_parallel.linear import ParallelLinear

__all__ = [
    "Layout",
    "ParallelAttention",
    "ParallelEmbedding",
    "ParallelLayerNorm",
    "ParallelLinear",
    "ParallelMLP",
    "Partition",
    "layouts",
    "parameter_shard_specs",
]
