"""Memory management for large models on small devices, for any ``nn.Module``.

:class:`Gemini` manages a model in one line; :func:`plan` is its planner and can be used alone. :func:`autochunk` runs
a model in chunks, so that its peak stays under a budget. :class:`HostBuffers` holds tensors that an operator offloads
to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.memory.chunking import ChunkedModule, ChunkPlan, SearchLimit, autochunk
    from fastfold.memory.devices.device import CudaDevice, Device, DeviceFull
    from fastfold.memory.devices.simulated import SimulatedDevice
    from fastfold.memory.devices.tiers import NvmeTier, Tier
    from fastfold.memory.gemini.config import GeminiConfig
    from fastfold.memory.gemini.manager import Gemini
    from fastfold.memory.offload import HostBuffers, disk_buffers
    from fastfold.memory.planner.planner import choose_spans, plan, with_spans
    from fastfold.memory.planner.schedule import Access, BudgetError, Plan, Span, smallest_budget
    from fastfold.utils.units import parse_bytes

__all__ = [
    "Access",
    "BudgetError",
    "ChunkPlan",
    "ChunkedModule",
    "CudaDevice",
    "Device",
    "DeviceFull",
    "Gemini",
    "GeminiConfig",
    "HostBuffers",
    "NvmeTier",
    "Plan",
    "SearchLimit",
    "SimulatedDevice",
    "Span",
    "Tier",
    "autochunk",
    "choose_spans",
    "disk_buffers",
    "parse_bytes",
    "plan",
    "smallest_budget",
    "with_spans",
]

__getattr__, __dir__ = lazy_names(__name__)
