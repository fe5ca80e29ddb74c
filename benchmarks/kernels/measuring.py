"""Measurements of the kernels' benchmark: times by events, memory of the allocator, ceilings of the same run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.recording import launches_observed

Inputs = dict[str, Any]
"""Arguments of an operator by name."""

KERNEL_CALLS = 7
"""Number of calls that a kernel is measured in."""

CLOCK = 2e9
"""Cycles per second of a GPU that waits, at most."""

MAX_CYCLES = 2**30
"""Longest wait of the device for a call to be queued; a call that takes longer waits for the device itself."""

LAUNCH_CYCLES = 2**22
"""Wait of the device for one launch to be queued."""

MAX_SETS = 8
"""Maximum number of copies of the inputs that a measurement rotates through."""


@dataclass(frozen=True)
class Timing:
    """Cost of a function's calls.

    Attributes:
        milliseconds: Median of one call on the device, which does not wait for the host.
        host_milliseconds: Median until the call returns on the host.
        spread: Half of the interquartile range, over the median.
        peak_bytes: Peak memory of a call above the memory before it; NaN if the allocator does not report it.
    """

    milliseconds: float
    host_milliseconds: float
    spread: float
    peak_bytes: float


@dataclass(frozen=True)
class Ceilings:
    """Best rates of the device, measured in this run.

    Attributes:
        tflops: Rate of a large matrix product in the dtype of the benchmark, in 10¹² operations per second.
        gbs: Rate of a copy within device memory, in 10⁹ bytes per second, read and written.
    """

    tflops: float
    gbs: float


class Meter:
    """Measurement of calls on a device.

    Args:
        device: CUDA (times of events, memory of the allocator) or CPU (wall time, no memory).
        seconds: Time limit of one measurement's repetitions.
    """

    def __init__(self, device: torch.device, seconds: float = 0.25) -> None:
        self.device, self.seconds = device, seconds
        self.cuda = device.type == "cuda"
        cache = torch.cuda.get_device_properties(device).L2_cache_size if self.cuda else 0
        self._rotation = 2 * cache

    def sets(self, inputs: Inputs) -> list[Inputs]:
        """Return the inputs and enough copies that a rotation evicts the first from the L2 cache."""
        size = sum(x.nbytes for x in inputs.values() if isinstance(x, Tensor))
        count = min(MAX_SETS, max(1, math.ceil(self._rotation / max(1, size))))
        return [inputs, *(_copied(inputs) for _ in range(count - 1))]

    def time(self, function: Callable[[Inputs], object], sets: Sequence[Inputs]) -> Timing:
        """Measure calls that take the sets in turn, after calls that compile and warm up."""
        function(sets[0])
        self._wait()
        peak = self._peak(lambda: function(sets[0]))
        cycles = self._filling_cycles(lambda: function(sets[-1]))
        first = max(self._once(lambda: function(sets[-1]), cycles))
        count = max(3, min(100, int(self.seconds * 1e3 / max(first, 1e-3))))
        calls = [self._once(partial(function, sets[i % len(sets)]), cycles) for i in range(count)]
        on_device, on_host = zip(*calls, strict=True)
        median = statistics.median(on_device)
        quartiles = statistics.quantiles(on_device, n=4)
        return Timing(median, statistics.median(on_host), (quartiles[2] - quartiles[0]) / 2 / median, peak)

    def kernel_time(self, function: Callable[[Inputs], object], sets: Sequence[Inputs], kernel: str) -> float:
        """Return the milliseconds of a kernel's launches within a call, the median of several calls.

        Args:
            function: Function that launches the kernel; the first call compiles and warms up.
            sets: Arguments that the calls take in turn.
            kernel: Name of the kernel in the table of configurations.
        """
        found = []
        for i in range(1 + KERNEL_CALLS):
            total = 0.0

            def add(run: Callable[[], object]) -> None:
                nonlocal total
                total += self._once(run, LAUNCH_CYCLES)[0]

            with launches_observed(kernel, add):
                function(sets[i % len(sets)])
            found.append(total)
        return statistics.median(found[1:])

    def ceilings(self, dtype: torch.dtype) -> Ceilings:
        """Measure the rates of a matrix product and of a copy, on random data larger than the caches."""
        size = 8192 if self.cuda else 128  # a trial on the CPU measures nothing
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        product = self.time(lambda _: a @ b, [{}])
        x = torch.randn(2**28 if self.cuda else 2**20, device=self.device)
        y = torch.empty_like(x)
        copy = self.time(lambda _: y.copy_(x), [{}])
        return Ceilings(2 * size**3 / product.milliseconds / 1e9, 2 * x.nbytes / copy.milliseconds / 1e6)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _peak(self, call: Callable[[], object]) -> float:
        if not self.cuda:
            call()
            return math.nan
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        self._wait()
        del result
        return float(torch.cuda.max_memory_allocated(self.device) - before)

    def _once(self, call: Callable[[], object], cycles: int = 0) -> tuple[float, float]:
        """Return the milliseconds of a call on the device and on the host; the device sleeps for ``cycles`` first."""
        if not self.cuda:
            start = time.perf_counter()
            call()
            return 2 * ((time.perf_counter() - start) * 1e3,)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if cycles:
            torch.cuda._sleep(cycles)
        begin.record()
        start = time.perf_counter()
        call()
        host = (time.perf_counter() - start) * 1e3
        end.record()
        self._wait()
        return begin.elapsed_time(end), host

    def _filling_cycles(self, call: Callable[[], object]) -> int:
        """Return the cycles that the device has to sleep until a call is queued; 0 for one that waits for it."""
        if not self.cuda:
            return 0
        self._wait()
        start = time.perf_counter()
        call()
        cycles = int(2 * CLOCK * (time.perf_counter() - start))
        self._wait()
        while cycles <= MAX_CYCLES:
            asleep = torch.cuda.Event()
            torch.cuda._sleep(cycles)
            asleep.record()
            call()
            is_queued = not asleep.query()
            self._wait()
            if is_queued:
                return cycles
            cycles *= 2
        return 0


def _copied(inputs: Mapping[str, Any]) -> Inputs:
    return {
        k: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for k, x in inputs.items()
    }
