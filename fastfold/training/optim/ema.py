"""The exponential moving average of the weights, by which a model is evaluated (supplement, section 1.11.7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.guarded_step import keep_unless


class ExponentialMovingAverage:
    """Keeps ``average = decay * average + (1 - decay) * parameter`` of every parameter that trains.

    The average is float32, whatever the parameters are: at a decay of 0.999 bfloat16 would round most updates away.
    A parameter that several layers share is averaged once. Parameters that are frozen when the average is made, and
    all buffers, are the model's own in training and in evaluation.

    Args:
        model: The network; its parameters' values are where the average starts.
        decay: Share of the old average that stays at an update.
        warm_up: Use a smaller decay, ``(1 + n) / (10 + n)`` at update ``n``, as long as that is less: the average
            then leaves the initial weights behind sooner. Not in the supplement.

    Attributes:
        reach: Context in which the parameters are plain tensors, entered whenever they are read or written. To be set
            by whoever moves them about.

    Raises:
        ConfigError: The decay does not lie in 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warm_up: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"the decay of the average must lie in 0 to 1, got {decay}")
        self._decay, self._warm_up, self._updates = decay, warm_up, 0
        self.reach: Callable[[], AbstractContextManager[None]] = nullcontext
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shadow = {
            name: p.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, ok: Tensor | None = None) -> None:
        """Take the parameters' values into the average; to be called after each optimisation step.

        Args:
            ok: A boolean scalar on the device: whether there is an update, without the host knowing it yet; if not,
                :meth:`forget_update` has to be called before the next one. None for an update.
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
        """Count one update less: the last one was none."""
        self._updates -= 1

    def tensors(self) -> dict[str, Tensor]:
        """The average itself, float32 by parameter name; filling these tensors restores a checkpoint."""
        return dict(self._shadow)

    def counters(self) -> dict[str, int]:
        """What a checkpoint needs besides :meth:`tensors`, as JSON."""
        return {"updates": self._updates}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Restore what :meth:`counters` gave."""
        self._updates = int(counters["updates"])

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside the block the model computes with the average; afterwards its weights are bit by bit what they were.

        They come back after an error or an interrupt in the block as well.
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
