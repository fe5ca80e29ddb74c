"""Design of proteins by gradients of the network with respect to the sequence.

Names are loaded on first use, so that the command line's help needs no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.products.design.config import DesignConfig
    from fastfold.products.design.results.design import Design
    from fastfold.products.design.results.program import SequenceProgram
    from fastfold.products.design.results.redesign import Redesign
    from fastfold.products.design.run import DesignRequest, run_designs
    from fastfold.products.design.tasks.binders import BinderParts, binder
    from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination, partial
    from fastfold.products.design.tasks.task import DesignTask

__all__ = [
    "BinderParts",
    "Design",
    "DesignConfig",
    "DesignRequest",
    "DesignTask",
    "Redesign",
    "SequenceProgram",
    "binder",
    "fixed_backbone",
    "hallucination",
    "partial",
    "run_designs",
]

__getattr__, __dir__ = lazy_names(__name__)
