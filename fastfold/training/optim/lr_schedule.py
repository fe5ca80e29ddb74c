"""Learning rate as a pure function of the step (supplement, section 1.11.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastfold.errors import ConfigError


@dataclass(frozen=True)
class AlphaFoldSchedule:
    """Schedule with linear warm-up from zero, a constant rate, one decay, and optionally a final cosine.

    The supplement counts in samples: 0.128 million of warm-up, and a factor of 0.95 after 6.4 million. At its batch
    size of 128 these are the default 1,000 and 50,000 steps; for another batch size divide the samples by it.
    Fine-tuning starts without warm-up from half the rate.

    The schedule is stateless, so a resumed run has the rates of an uninterrupted one.

    Raises:
        ConfigError: A value is out of range.
    """

    base_lr: float = 1e-3  #: Rate after warm-up
    warmup_steps: int = 1000  #: Step at which the base rate is reached; 0 for none
    decay_after: int | None = 50_000  #: Last step before the decay, or None for no decay
    decay_factor: float = 0.95  #: Factor of all later rates
    #: Step at which a half cosine from the end of warm-up ends; None for no cosine. Not in the supplement, for small
    #: runs.
    total_steps: int | None = None
    final_fraction: float = 0.0  #: Share of the base rate at which the cosine ends

    def __post_init__(self) -> None:
        if not (self.base_lr > 0 and math.isfinite(self.base_lr)):
            raise ConfigError(f"the learning rate must be a number above 0, got {self.base_lr}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warm-up must take at least 0 steps, got {self.warmup_steps}")
        if not 0 < self.decay_factor <= 1:
            raise ConfigError(f"the decay factor must be above 0 and at most 1, got {self.decay_factor}")
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"the cosine's final fraction must be in 0 to 1, got {self.final_fraction}")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"the cosine ends at step {self.total_steps}, but warm-up lasts until step {self.warmup_steps}; "
                "lengthen the one or shorten the other"
            )

    def lr(self, step: int) -> float:
        """Return the learning rate of an optimisation step, counted from 1; 0 is for the rate before the first step."""
        lr = self.base_lr
        if step < self.warmup_steps:
            lr *= step / self.warmup_steps
        elif self.total_steps is not None:
            share = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
            lr *= self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * share))
        if self.decay_after is not None and step > self.decay_after:
            lr *= self.decay_factor
        return lr
