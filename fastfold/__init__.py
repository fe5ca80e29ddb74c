"""FastFold: the AlphaFold 2 family of protein structure networks, exact, fast and lean.

The names below are loaded on first use, so that ``import fastfold`` and ``fastfold --help`` stay quick.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastfold._version import __version__
from fastfold.errors import FastFoldError

_LAZY = {
    "AlphaFold": "fastfold.evoformer.model",
    "Prediction": "fastfold.inference.output.prediction",
    "load_model": "fastfold.inference.api",
    "predict": "fastfold.inference.api",
    "model_config": "fastfold.evoformer.config",
}

__all__ = ["AlphaFold", "FastFoldError", "Prediction", "__version__", "load_model", "model_config", "predict"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fastfold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
