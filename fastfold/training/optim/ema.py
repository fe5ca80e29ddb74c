"""Exponential moving average of the weights, used for evaluation (supplement, section 1.11.7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.optimizer import keep_unless


class ExponentialMovingAverage:
    """Average ``average = decay * average + (1 - decay) * parameter`` of every trained parameter.

    The average is float32 for parameters of any dtype: at a decay of 0.999 bfloat16 would round most updates away.
    A parameter that several layers share is averaged once. Parameters that are frozen when the average is created, and
    all buffers, are not averaged.

    Args:
        model: The network; the average starts from its parameters.
        decay: Share of the old average that an update keeps.
        warm_up: Use the decay ``(1 + n) / (10 + n)`` at update ``n`` while it is smaller, so that the average forgets
            the initial weights sooner. Not in the supplement.

    Attributes:
        reach: Context in which the parameters are plain tensors, entered for reads and writes. Memory managers set it.

    Raises:
        ConfigError: The decay is not in 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warm_up: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"the decay of the average must be in 0 to 1, got {decay}")
        self._decay, self._warm_up, self._updates = decay, warm_up, 0
        self.reach: Callable[[], AbstractContextManager[None]] = nullcontext
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shadow = {
            name: p.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, ok: Tensor | None = None) -> None:
        """Update the average by the parameters; call after each optimisation step.

        If the boolean scalar ``ok`` on the device is False, the average stays, before the host knows the value. The
        caller then calls :meth:`forget_update` before the next update.
        """
        self._updates += 1
        decay = self._decay
        if self._warm_up:
            decay = min(decay, (1 + self._updates) / (10 + self._updates))
        if self._shadow:
            with self.reach():
                values = [p.detach().float() for p in self._parameters.values()]
                averages = list(self._shadow.values())
                kept = [] if ok is None else [x.clone() for x in averages]
                torch._foreach_lerp_(averages, values, 1 - decay)
                if ok is not None:
                    keep_unless(ok, averages, kept)

    def forget_update(self) -> None:
        """Decrease the count of updates, after an update with a false ``ok``."""
        self._updates -= 1

    def tensors(self) -> dict[str, Tensor]:
        """Return the average, float32 tensors by parameter name; filling them restores a checkpoint."""
        return dict(self._shadow)

    def counters(self) -> dict[str, int]:
        """Return the state other than :meth:`tensors`, as JSON."""
        return {"updates": self._updates}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Restore the state from :meth:`counters`."""
        self._updates = int(counters["updates"])

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's weights by the average inside the block, and restore them bit by bit.

        They are also restored after an error or an interrupt in the block.
        """
        with self.reach():
            kept = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._fill(self._shadow)
            yield
        finally:
            self._fill(kept)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        with self.reach():
            for name, p in self._parameters.items():
                p.copy_(values[name])
