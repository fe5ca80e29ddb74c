"""Parallel forms of the AlphaFold network; no other part of ``fastfold.parallel`` knows the network.

General methods are one level up; this folder applies them to the modules of :mod:`fastfold.evoformer`.
"""

from fastfold.parallel.alphafold.dap import axial_parallel, shard
from fastfold.parallel.alphafold.grid import grid_parallel

__all__ = ["axial_parallel", "grid_parallel", "shard"]
