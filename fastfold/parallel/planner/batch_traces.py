"""Traces of a step by the number of samples that a rank runs at once.

Work and memory of an operator are a constant, from its parameters, plus a multiple of the samples. So two traces give
those in between. A trace is recorded where a model runs other operators for another number of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastfold.parallel.planner.recorder import Part, Trace


@dataclass
class BatchTraces:
    """Traces of one model by number of samples."""

    record: Callable[[int], Trace]  #: Records a trace of a number of samples
    _recorded: dict[int, Trace] = field(default_factory=dict)

    def at(self, rows: int) -> Trace:
        """Return the trace of ``rows`` samples: recorded, or from two recorded ones around it."""
        if rows in self._recorded:
            return self._recorded[rows]
        large = min((more for more in self._recorded if more > rows), default=0)
        # PyTorch leaves copies out for one sample, so its trace says little about more.
        small = 2
        if not large or rows <= small:
            return self._record(rows)
        if small not in self._recorded:
            self._record(small)
        share = (rows - small) / (large - small)
        between = _between(self._recorded[small], self._recorded[large], share)
        return self._record(rows) if between is None else between

    def _record(self, rows: int) -> Trace:
        self._recorded[rows] = self.record(rows)
        return self._recorded[rows]


def _between(small: Trace, large: Trace, share: float) -> Trace | None:
    """Interpolate two traces; None if their operators differ."""
    regions = {}
    for name, a in small.regions.items():
        b = large.regions[name]
        forward = _part_between(a.forward, b.forward, share)
        backward = _part_between(a.backward, b.backward, share)
        if forward is None or backward is None:
            return None
        regions[name] = replace(
            a,
            forward=forward,
            backward=backward,
            entering=round(_mix(a.entering, b.entering, share)),
            kept=round(_mix(a.kept, b.kept, share)),
        )
    # A maximum of sums is convex, so the line is not below it.
    return Trace(regions, _mix(small.peak, large.peak, share))


def _part_between(a: Part, b: Part, share: float) -> Part | None:
    if len(a.operations) != len(b.operations) or a.sent or b.sent:
        return None
    part = Part()
    for (one, count), (other, times) in zip(a.operations.items(), b.operations.items(), strict=True):
        if (one.name, one.dtype, one.launches, count) != (other.name, other.dtype, other.launches, times):
            return None
        mixed = one._replace(
            flops=_mix(one.flops, other.flops, share),
            traffic=_mix(one.traffic, other.traffic, share),
            exponentials=_mix(one.exponentials, other.exponentials, share),
        )
        part.operations[mixed] += count
    return part


def _mix(a: float, b: float, share: float) -> float:
    return a + share * (b - a)
