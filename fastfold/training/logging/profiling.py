"""Measurement of steps: counted floating-point operations, and traces of a few steps for Chrome and Perfetto.

Operations are those of matrix products, counted once per shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.errors import OutputError
from fastfold.parallel.planner.recorder import operator_cost
from fastfold.utils.atomic_files import prepare_output_directory, replacing

_BEFORE = 2  #: Steps to skip before profiling, because the first ones load libraries
_BETWEEN_COUNTS = 50  #: Minimum number of samples between two counts, because counting slows a sample down


class _Counting(TorchDispatchMode):
    """Dispatch mode that adds up the operations of every operator, forward and backward."""

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
    """Counter of this process's operations for the samples of a step.

    Counts the matrix products of forward, recycling, recomputation and backward, without the optimizer
    (``torch.utils.flop_counter``, and the declared cost of fused operators). A multiply-add is two operations. Samples
    of one shape are counted once. Operations in compiled code cannot be counted.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._known: dict[Any, float] = {}
        self._since = _BETWEEN_COUNTS
        self._flops, self._residues = 0.0, 0

    @contextmanager
    def sample(self, arrays: Mapping[str, np.ndarray], residues: int, recycles: int) -> Iterator[None]:
        """Count the operations of one sample, forward and backward, computed inside the block."""
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
        """Return operations and residues of the samples with known shapes since the last call."""
        counted = self._flops, self._residues
        self._flops, self._residues = 0.0, 0
        return counted


def flop_rates(flops: float, counted: float, seconds: float, devices: int) -> dict[str, float]:
    """Return a step's operations per second under the names of logs; empty if none was counted.

    ``flops`` is those of samples with known shapes, over all processes, and ``counted`` their share of the step's
    residues, 0 to 1; other samples count the same per residue. The seconds include waiting and the optimizer.
    """
    if not counted or not seconds:
        return {}
    rate = flops / counted / seconds / 1e12
    return {"tflops_per_s": rate, "tflops_per_s_device": rate / devices, "flops_counted": counted}


class StepProfiler:
    """Context manager that profiles some steps of a run with ``torch.profiler``, and writes a trace into a folder.

    ``report`` is called with one sentence when it is written, or cannot be.
    """

    def __init__(self, folder: Path, steps: int, report: Callable[[str], None]) -> None:
        self._folder, self._report = folder, report
        self._profile: profile | None = None
        self._last = 0
        if steps:
            wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
            self._profile = profile(
                activities=wanted & supported_activities(),
                schedule=schedule(wait=_BEFORE - 1, warmup=1, active=steps, repeat=1),
                on_trace_ready=self._write,
            )

    def __enter__(self) -> StepProfiler:
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._profile.stop()

    def step(self, number: int) -> None:
        """Record that step ``number`` has finished."""
        self._last = number
        if self._profile is not None:
            self._profile.step()

    def _write(self, profiled: profile) -> None:
        path = self._folder / f"until_step_{self._last:08d}.json"
        try:
            prepare_output_directory(self._folder)
            with replacing(path) as temporary:
                profiled.export_chrome_trace(str(temporary))
        except OutputError as error:
            self._report(f"no profile: {error}")
            return
        self._report(f"profile in {path}; open it at https://ui.perfetto.dev or chrome://tracing")
