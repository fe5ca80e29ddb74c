"""Design of proteins by gradients of the network with respect to the sequence."""

from fastfold.inference.design.optimise import DesignConfig
from fastfold.inference.design.results.program import SequenceProgram
from fastfold.inference.design.results.table import Design
from fastfold.inference.design.run import Redesign, run_designs
from fastfold.inference.design.task import DesignTask, binder, fixed_backbone, hallucination, partial

__all__ = [
    "Design",
    "DesignConfig",
    "DesignTask",
    "Redesign",
    "SequenceProgram",
    "binder",
    "fixed_backbone",
    "hallucination",
    "partial",
    "run_designs",
]
