"""Training of networks: trainer, configuration, checkpoints, logging and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfold.utils.lazy import lazy_names

if TYPE_CHECKING:
    from fastfold.training.config import TrainConfig
    from fastfold.training.trainer import Trainer

__all__ = ["TrainConfig", "Trainer"]

__getattr__, __dir__ = lazy_names(__name__)
