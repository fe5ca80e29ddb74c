"""Run any module in less memory: parts of its graph run in chunks to stay under a budget."""

from fastfold.memory.chunking import flow_rules  # noqa: F401  registers rules
from fastfold.memory.chunking.api import SearchLimit, autochunk
from fastfold.memory.chunking.chunked_module import ChunkedModule, ChunkPlan, Region

__all__ = ["ChunkPlan", "ChunkedModule", "Region", "SearchLimit", "autochunk"]
