"""Layers that are split over the ranks of a tensor parallel group: 1d, 2d, 2.5d and 3d."""

from fastfold.parallel.tensor_parallel.attention import ParallelAttention
from fastfold.parallel.tensor_parallel.embedding import ParallelEmbedding
from fastfold.parallel.tensor_parallel.layout import Layout, Partition, layouts, parameter_shard_specs
from fastfold.parallel.tensor_parallel.linear import ParallelLinear
from fastfold.parallel.tensor_parallel.mlp import ParallelMLP
from fastfold.parallel.tensor_parallel.norm import ParallelLayerNorm

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
