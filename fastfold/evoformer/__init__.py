"""The AlphaFold 2 network, one file per algorithm.

Public names are loaded on first use, so that reading a configuration does not import PyTorch's operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack
    from fastfold.evoformer.execution import ExecutionPolicy
    from fastfold.evoformer.model import AlphaFold

__all__ = ["AlphaFold", "EvoformerBlock", "EvoformerStack", "ExecutionPolicy"]

__getattr__, __dir__ = lazy_names(__name__)
