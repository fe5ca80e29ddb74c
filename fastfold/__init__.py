"""FastFold: the AlphaFold 2 family of protein structure networks, exact, fast and lean.

The names below are loaded on first use, so that ``import fastfold`` and ``fastfold --help`` stay quick.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fastfold._version import __version__
from fastfold.errors import FastFoldError
from fastfold.utils.lazy import MovedModules, lazy_names

if TYPE_CHECKING:
    from fastfold.data.features.pipeline import featurize
    from fastfold.data.search.local import search
    from fastfold.evoformer.config import model_config
    from fastfold.evoformer.model import AlphaFold
    from fastfold.evoformer.quantization.any_module import quantize
    from fastfold.inference.api import embed, load_model, predict, predict_many
    from fastfold.inference.output.prediction import Prediction
    from fastfold.inference.relax.protocol import relax_prediction
    from fastfold.inference.sampling.settings import Sampling
    from fastfold.memory.gemini.config import GeminiConfig
    from fastfold.memory.gemini.manager import Gemini
    from fastfold.parallel.apply_plan import parallelize
    from fastfold.parallel.plan import ParallelPlan
    from fastfold.products.exporting.export import export, load_exported
    from fastfold.products.notebook.view import view
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
    "relax_prediction",
    "search",
    "train",
    "view",
]

__getattr__, __dir__ = lazy_names(__name__)

_MOVED = {
    **{
        f"fastfold.inference.{name}": f"fastfold.products.{name}"
        for name in (
            *("design", "ensemble", "exporting", "mutate", "notebook", "score", "serve", "verify"),
            "screen.targets",
        )
    },
    "fastfold.inference.design.optimise": "fastfold.products.design.optimize",
    "fastfold.inference.embed": "fastfold.inference.embedding",
    "fastfold.inference.ensemble.samples": "fastfold.inference.sampling.samples",
    "fastfold.inference.ensemble.settings": "fastfold.inference.sampling.settings",
    "fastfold.inference.screen": "fastfold.inference.workers",
}
"""Paths of version 0.1 and today's; they go with the release after next."""
sys.meta_path.insert(0, MovedModules(_MOVED))  # a new package would give its modules second names
