"""What the processes of a run have to say of a step: gathered on the device, and read in one transfer, maybe later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastfold.parallel import DistributedContext
from fastfold.utils.device import HostCopy, upload

Numbers = dict[str, float]

_KNOWN = ("bad", "signal", "residues", "waited_s", "flops", "counted")
"""First columns of what is gathered: whether a sample of the process was not finite, and what it knows itself."""


@dataclass
class Share:
    """One process's samples of a step.

    Attributes:
        batch: Samples of the step on all processes.
        signal: What told this process to stop; 0 for nothing.
        means: Its parts of the batch's means, float64 scalars on the device.
        names: Of its samples.
        bad: Of each sample, whether its loss or gradient was not finite, on the device.
        residues: Of its samples together.
        waited_s: Seconds in which it waited for them.
        flops: Operations of ``counted`` residues.
        counted: See above.
    """

    batch: int
    signal: int
    means: dict[str, Tensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    bad: list[Tensor] = field(default_factory=list)
    residues: int = 0
    waited_s: float = 0.0
    flops: float = 0.0
    counted: int = 0

    def add(self, name: str, numbers: Mapping[str, Tensor], residues: int) -> None:
        """Take a sample's numbers; ``loss`` and ``gradient_norm`` have to be finite for it to count.

        Args:
            name: Of the sample.
            numbers: Scalars.
            residues: Its length.
        """
        self.names.append(name)
        self.residues += residues
        device = numbers["loss"].device
        values = {key: x.detach().to(device, torch.float64) for key, x in numbers.items()}
        self.bad.append(~(values["loss"].isfinite() & values["gradient_norm"].isfinite()))
        for key, value in values.items():
            part = value / self.batch
            self.means[key] = self.means[key] + part if key in self.means else part

    def bad_names(self) -> list[str]:
        """Samples of this process that were not finite; waits for the device."""
        return [name for name, bad in zip(self.names, self.bad, strict=True) if bool(bad)]


class StepOutcome:
    """A step's shares of all processes (a collective of all when it is made).

    Args:
        share: This process's.
        keys: Of the means, the same on all processes.
        context: The run's processes.
        known: Numbers of the step that every process knows.

    Attributes:
        ok: Whether all samples of all processes were finite: a boolean scalar on the device.
    """

    def __init__(
        self, share: Share, keys: Sequence[str], context: DistributedContext, known: Mapping[str, float]
    ) -> None:
        self.share, self._keys, self._context, self._known = share, list(keys), context, dict(known)
        device = context.device
        own = torch.tensor(
            [0.0, share.signal, share.residues, share.waited_s, share.flops, share.counted],
            dtype=torch.float64,
        )
        zero = torch.zeros((), dtype=torch.float64, device=device)
        means = [share.means.get(key, zero).to(device) for key in self._keys]
        row = torch.cat([upload(own, device), torch.stack(means)]) if means else upload(own, device)
        if share.bad:
            row[0] = torch.stack(share.bad).any()
        self._rows = context.gather_numbers(row)
        self.ok = self._rows[:, 0].sum() == 0
        self._more: dict[str, Tensor] = {}
        self._copy: HostCopy | None = None
        self._copied: list[str] = []

    def add(self, key: str, value: Tensor) -> None:
        """Take one more number of the step, the same on all processes; after the copy it is read by itself."""
        self._more[key] = value

    def start_copy(self) -> None:
        """Start to copy everything to the host; the device goes on meanwhile."""
        if self._copy is None:
            more = [x.detach().to(self._rows.device, torch.float64).reshape(1) for x in self._more.values()]
            self._copy = HostCopy(torch.cat([self._rows.flatten(), *more]))
            self._copied = list(self._more)

    def read(self) -> tuple[Numbers, int, bool]:
        """The step's numbers, the signal that some process got (0 for none), and whether all samples were finite."""
        self.start_copy()
        assert self._copy is not None
        values = self._copy.read()
        count = self._rows.numel()
        rows = values[:count].view(self._rows.shape).tolist()
        columns = {name: [row[number] for row in rows] for number, name in enumerate(_KNOWN)}
        residues = sum(columns["residues"])
        flops, counted = sum(columns["flops"]), sum(columns["counted"]) / residues
        # What processes that work on one sample have to say counts once.
        leaders = self._context.leaders(rows)
        numbers: Numbers = {
            key: sum(row[len(_KNOWN) + number] for row in leaders) for number, key in enumerate(self._keys)
        }
        waited = self._context.leaders(columns["waited_s"])
        numbers |= {"residues": sum(self._context.leaders(columns["residues"])), "waited_s": max(waited)}
        numbers |= {"flops": flops, "counted": counted} | self._known
        numbers |= {key: float(x) for key, x in self._more.items() if key not in self._copied}
        numbers |= dict(zip(self._copied, values[count:].tolist(), strict=True))
        return numbers, int(max(columns["signal"])), not any(columns["bad"])


def _nothing() -> None:
    """Nothing was done that could be forgotten."""


@dataclass
class TakenStep:
    """A step that was taken, maybe without knowing yet whether it counts.

    Attributes:
        outcome: What became of it.
        step: Its number, from 1.
        samples: That the run had consumed after it.
        started: When it began, of ``time.perf_counter``.
        undo: Forgets on the host that it was taken, if it does not count; the device knew it by itself.
    """

    outcome: StepOutcome
    step: int
    samples: int
    started: float
    undo: Callable[[], None] = _nothing
