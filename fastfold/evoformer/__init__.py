"""The AlphaFold 2 network, one file per algorithm.

Public names are loaded on first use, so that reading a configuration does not import PyTorch's operators.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack
    from fastfold.evoformer.execution import ExecutionPolicy
    from fastfold.evoformer.model import AlphaFold

_LAZY = {
    "AlphaFold": "model",
    "EvoformerBlock": "evoformer",
    "EvoformerStack": "evoformer",
    "ExecutionPolicy": "execution",
}

__all__ = ["AlphaFold", "EvoformerBlock", "EvoformerStack", "ExecutionPolicy"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
