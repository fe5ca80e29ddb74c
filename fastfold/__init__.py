"""FastFold: the AlphaFold 2 family of protein structure networks, exact, fast and lean.

The names below are loaded on first use, so that ``import fastfold`` and ``fastfold --help`` stay quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold._version import __version__
from fastfold.errors import FastFoldError
from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.data.features.pipeline import featurize
    from fastfold.data.search.local import search
    from fastfold.evoformer.config import model_config
    from fastfold.evoformer.model import AlphaFold
    from fastfold.evoformer.quantization.any_module import quantize
    from fastfold.inference.api import embed, load_model, predict, predict_many
    from fastfold.inference.ensemble.settings import Sampling
    from fastfold.inference.exporting.export import export, load_exported
    from fastfold.inference.output.prediction import Prediction
    from fastfold.memory.gemini.config import GeminiConfig
    from fastfold.memory.gemini.manager import Gemini
    from fastfold.parallel.apply_plan import parallelize
    from fastfold.parallel.plan import ParallelPlan
    from fastfold.protein.metrics.compare import compare_structures
    from fastfold.protein.protein import Protein
    from fastfold.training.run import train

__all__ = [
    "AlphaFold",
    "FastFoldError",
    "Gemini",
    "GeminiConfig",
    "ParallelPlan",
    "Prediction",
    "Protein",
    "Sampling",
    "__version__",
    "compare_structures",
    "embed",
    "export",
    "featurize",
    "load_exported",
    "load_model",
    "model_config",
    "parallelize",
    "predict",
    "predict_many",
    "quantize",
    "search",
    "train",
]

__getattr__, __dir__ = lazy_names(__name__)
