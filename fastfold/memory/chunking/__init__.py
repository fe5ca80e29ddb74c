"""Any module in less memory: regions of its graph run in chunks, so that its peak stays under a budget."""

from fastfold.memory.chunking import flow_products, flow_shapes  # noqa: F401  they register rules
from fastfold.memory.chunking.api import autochunk
from fastfold.memory.chunking.chunked_module import ChunkedModule
from fastfold.memory.chunking.plan import ChunkPlan, Region

__all__ = ["ChunkPlan", "ChunkedModule", "Region", "autochunk"]
