"""Numbers of a step from all processes, gathered on the device and read in one transfer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastfold.parallel import DistributedContext
from fastfold.utils.device import HostCopy, upload

Numbers = dict[str, float]

_KNOWN = ("bad", "signal", "residues", "waited_s", "flops", "counted", "busy_s")
"""First columns of a process's row: 1 if a sample was not finite, and numbers that the host knows."""


@dataclass
class StepSamples:
    """One process's samples of a step."""

    batch: int  #: Number of samples of the step on all processes
    signal: int = 0  #: Signal that stops this process; 0 for none
    #: This process's shares of the batch's means, float64 scalars on the device
    means: dict[str, Tensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  #: Names of its samples
    #: For each sample a boolean scalar on the device, True if its loss or gradient was not finite
    bad: list[Tensor] = field(default_factory=list)
    residues: int = 0  #: Total number of residues of its samples
    waited_s: float = 0.0  #: Seconds of waiting for its samples
    flops: float = 0.0  #: Operations of ``counted`` residues
    counted: int = 0  #: Number of residues whose operations are known
    busy_s: float = 0.0  #: Seconds of computing its samples in the step before; 0 if unknown

    def add(self, name: str, numbers: Mapping[str, Tensor], residues: int) -> None:
        """Add a sample's numbers; the sample is bad unless ``loss`` and ``gradient_norm`` are finite."""
        self.names.append(name)
        self.residues += residues
        device = numbers["loss"].device
        values = {key: x.detach().to(device, torch.float64) for key, x in numbers.items()}
        self.bad.append(~(values["loss"].isfinite() & values["gradient_norm"].isfinite()))
        for key, value in values.items():
            part = value / self.batch
            self.means[key] = self.means[key] + part if key in self.means else part

    def bad_names(self) -> list[str]:
        """Return the names of this process's samples that were not finite; waits for the device."""
        return [name for name, bad in zip(self.names, self.bad, strict=True) if bool(bad)]


class StepOutcome:
    """Numbers of a step from all processes; the constructor is a collective.

    ``keys`` are names of the means, the same on all processes, and ``known`` numbers that every process knows. ``ok``
    is a boolean scalar on the device, True if all samples of all processes were finite.
    """

    def __init__(
        self,
        samples: StepSamples,
        keys: Sequence[str],
        context: DistributedContext,
        known: Mapping[str, float],
    ) -> None:
        self.samples, self._keys, self._context, self._known = samples, list(keys), context, dict(known)
        device = context.device
        own = torch.tensor([0.0, *(getattr(samples, name) for name in _KNOWN[1:])], dtype=torch.float64)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        means = [samples.means.get(key, zero).to(device) for key in self._keys]
        row = torch.cat([upload(own, device), torch.stack(means)]) if means else upload(own, device)
        if samples.bad:
            row[0] = torch.stack(samples.bad).any()
        self._rows = context.gather_numbers(row)
        self.ok = self._rows[:, 0].sum() == 0
        self._more: dict[str, Tensor] = {}
        self._copy: HostCopy | None = None
        self._copied: list[str] = []

    def add(self, key: str, value: Tensor) -> None:
        """Add a number of the step, the same on all processes; after :meth:`start_copy` it is read separately."""
        self._more[key] = value

    def start_copy(self) -> None:
        """Start copying everything to the host, without stopping the device."""
        if self._copy is None:
            more = [x.detach().to(self._rows.device, torch.float64).reshape(1) for x in self._more.values()]
            self._copy = HostCopy(torch.cat([self._rows.flatten(), *more]))
            self._copied = list(self._more)

    def read(self) -> tuple[Numbers, int, bool]:
        """Return the step's numbers, a process's signal (0 for none), and True if all samples were finite."""
        self.start_copy()
        assert self._copy is not None
        values = self._copy.read()
        count = self._rows.numel()
        rows = values[:count].view(self._rows.shape).tolist()
        columns = {name: [row[number] for row in rows] for number, name in enumerate(_KNOWN)}
        residues = sum(columns["residues"])
        flops, counted = sum(columns["flops"]), sum(columns["counted"]) / residues
        # Processes that share a sample have the same numbers, so only leaders count.
        leaders = self._context.leaders(rows)
        numbers: Numbers = {
            key: sum(row[len(_KNOWN) + number] for row in leaders) for number, key in enumerate(self._keys)
        }
        waited = self._context.leaders(columns["waited_s"])
        numbers |= {"residues": sum(self._context.leaders(columns["residues"])), "waited_s": max(waited)}
        numbers |= {"flops": flops, "counted": counted} | self._known | straggling(columns["busy_s"])
        numbers |= {key: float(x) for key, x in self._more.items() if key not in self._copied}
        numbers |= dict(zip(self._copied, values[count:].tolist(), strict=True))
        return numbers, int(max(columns["signal"])), not any(columns["bad"])


def straggling(busy: Sequence[float]) -> Numbers:
    """Return which process computes longest, and how much longer than the mean.

    ``busy`` has the seconds of computing by process. The results are ``busy_s``, the mean; ``straggling``, the longest
    by the mean; and ``slowest_rank``. They are empty where one process is alone or a time is unknown.
    """
    if len(busy) < 2 or min(busy) <= 0:
        return {}
    mean = sum(busy) / len(busy)
    slowest = max(range(len(busy)), key=lambda rank: busy[rank])
    return {"busy_s": mean, "straggling": busy[slowest] / mean, "slowest_rank": float(slowest)}


class BusyTimer:
    """Time of this process's computation in the last finished step, without a wait for the device.

    ``seconds`` is 0 before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0
        self._marks: list[Any] = []

    def start(self) -> None:
        """Begin a step; the last step's time is then known, unless the device has not finished it."""
        if len(self._marks) == 2:
            first, last = self._marks
            if self._device.type != "cuda":
                self.seconds = last - first
            elif last.query():
                self.seconds = first.elapsed_time(last) / 1e3
        self._marks = [self._mark()]

    def stop(self) -> None:
        """End the computation of a step's samples."""
        self._marks = [*self._marks[:1], self._mark()]

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass
class RunProgress:
    """Progress of a run, saved in its checkpoints."""

    step: int = 0  #: Number of finished optimisation steps, with skipped ones
    samples: int = 0  #: Number of consumed samples
    skipped: int = 0  #: Number of steps skipped because a loss or gradient was not finite
    bad_in_a_row: int = 0  #: Number of consecutive skipped steps up to the last one
    seconds: float = 0.0  #: Training time over all starts of the run
    #: Steps and names of the samples whose loss or gradient was not finite
    bad_samples: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class PendingStep:
    """Optimisation step whose outcome the host may not know yet; it ends with a commit or a rollback."""

    outcome: StepOutcome  #: Numbers of the step
    step: int  #: Number of the step, from 1
    samples: int  #: Number of samples that the run had consumed after it
    started: float  #: Start time, from ``time.perf_counter``
    #: Reverts the host's counters of optimizer and average; the device skips the step alone
    revert_counters: Callable[[], None] = lambda: None

    def commit(self, progress: RunProgress) -> None:
        """Count the step as finite."""
        progress.bad_in_a_row = 0

    def rollback(self, progress: RunProgress, names: Iterable[str]) -> None:
        """Count the step as skipped for its bad samples, and revert its counters; the device skipped it already."""
        self.revert_counters()
        progress.skipped += 1
        progress.bad_in_a_row += 1
        progress.bad_samples += [(self.step, name) for name in names]
