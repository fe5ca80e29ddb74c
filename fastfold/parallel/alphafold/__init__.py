"""The AlphaFold network on many ranks: the only place of ``fastfold.parallel`` that knows the network.

What is general lives one level up; here it is put onto the modules of :mod:`fastfold.evoformer`.
"""

from fastfold.parallel.alphafold.dap import axial_parallel, shard
from fastfold.parallel.alphafold.grid import grid_parallel

__all__ = ["axial_parallel", "grid_parallel", "shard"]
