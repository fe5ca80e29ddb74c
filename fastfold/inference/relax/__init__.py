"""Relaxation: AlphaFold's restrained minimisation in the Amber99sb force field, with OpenMM.

OpenMM and pdbfixer are imported on first use, because the import is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.inference.relax.config import RelaxConfig
    from fastfold.inference.relax.files import relax_file
    from fastfold.inference.relax.protocol import RelaxedPrediction, relax, relax_prediction
    from fastfold.inference.relax.result import RelaxResult

__all__ = ["RelaxConfig", "RelaxResult", "RelaxedPrediction", "relax", "relax_file", "relax_prediction"]

__getattr__, __dir__ = lazy_names(__name__)
