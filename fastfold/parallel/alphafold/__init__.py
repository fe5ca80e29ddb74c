"""Parallel forms of the AlphaFold network; no other part of ``fastfold.parallel`` knows the network.

General methods are one level up; this folder applies them to the modules of :mod:`fastfold.evoformer`.
"""

from fastfold.parallel.alphafold.dap import axial_parallel, grid_parallel, shard

__all__ = ["axial_parallel", "grid_parallel", "shard"]
