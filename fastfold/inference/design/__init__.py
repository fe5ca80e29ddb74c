"""Design of proteins by gradients of the network with respect to the sequence."""

from fastfold.inference.design.optimise import DesignConfig
from fastfold.inference.design.run import Design, run_designs
from fastfold.inference.design.task import DesignTask, binder, fixed_backbone, hallucination, partial

__all__ = [
    "Design",
    "DesignConfig",
    "DesignTask",
    "binder",
    "fixed_backbone",
    "hallucination",
    "partial",
    "run_designs",
]
