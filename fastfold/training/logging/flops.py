"""How many floating-point operations a step does, and how fast: matrix products, counted once for each shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.parallel.planner.trace import operator_cost

_BETWEEN_COUNTS = 50
"""Samples from one count to the next: seeing every operator makes a sample take a fifth longer on a CPU."""


class _Counting(TorchDispatchMode):
    """Sees every operator of the forward and backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += operator_cost(func, args, kwargs, out).flops
        return out


class FlopCounter:
    """Counts what this process computes for the samples of a step.

    What is counted are the matrix products that are carried out (``torch.utils.flop_counter``, and of fused operators
    what they declare), two operations for each multiply-add: forward, recycling, recomputation and backward, without
    the optimizer. The count of a sample is kept for all others of its shape.

    Args:
        enabled: Whether to count; compiled code cannot be seen.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._known: dict[Any, float] = {}
        self._since = _BETWEEN_COUNTS
        self._flops, self._residues = 0.0, 0

    @contextmanager
    def sample(self, arrays: Mapping[str, np.ndarray], residues: int, recycles: int) -> Iterator[None]:
        """Inside the block one sample is computed, forward and backward.

        Args:
            arrays: The sample.
            residues: Its length.
            recycles: Recycling iterations.
        """
        self._since += 1
        shape = (recycles, tuple(sorted((name, x.shape) for name, x in arrays.items())))
        if self._enabled and shape not in self._known and self._since > _BETWEEN_COUNTS:
            with _Counting() as counting:
                yield
            self._known[shape], self._since = counting.flops, 0
        else:
            yield
        if shape in self._known:
            self._flops += self._known[shape]
            self._residues += residues

    def take(self) -> tuple[float, int]:
        """Operations of the samples since the last call whose shapes are known, and how many residues they have."""
        found = self._flops, self._residues
        self._flops, self._residues = 0.0, 0
        return found


def flop_rates(flops: float, counted: float, seconds: float, devices: int) -> dict[str, float]:
    """Operations per second of a step, as they are logged; nothing if none was counted.

    Args:
        flops: Operations of samples whose shapes are known, over all processes.
        counted: Their share of the step's residues, 0 to 1; the others are taken to cost as much for each residue.
        seconds: Of the step, waiting and the optimizer included.
        devices: Processes of the run.
    """
    if not counted or not seconds:
        return {}
    rate = flops / counted / seconds / 1e12
    return {"tflops_per_s": rate, "tflops_per_s_device": rate / devices, "flops_counted": counted}
