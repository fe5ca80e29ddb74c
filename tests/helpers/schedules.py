"""Learning rate schedules whose rates a resumed run has to continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "steps": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=40),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.7**step),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
}
