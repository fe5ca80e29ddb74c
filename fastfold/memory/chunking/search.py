"""Choose the regions that run in chunks, and their number of chunks.

Follows Zhao et al. 2024, "AutoChunk: Automated Activation Chunk for Memory-Efficient Long Sequence Inference". The
largest peak comes first: estimate the memory, find the regions along which dimensions flow around the peak, and take
the cheapest region that brings the peak under the budget.
"""

from __future__ import annotations

import functools
import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fastfold.memory.chunking.flow import Cut, find_cut
from fastfold.memory.chunking.graph import ChunkLayout, Graph
from fastfold.memory.chunking.steps import (
    Loop,
    Memory,
    Profile,
    Step,
    StepState,
    computed_values,
    inner_bytes,
    profile,
    used_values,
)

#: Numbers of steps that a region may extend before and after a peak; larger ones are tried if a smaller one fails
_WINDOWS = (16, 64)
_BEGINNINGS = 8
_REFINED = 64
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention")


@dataclass(frozen=True)
class Flow:
    """Values that can be computed in chunks, up to one end value."""

    end: int
    length: int  #: Length of the chunked dimension of ``end``
    dims: dict[int, int]  #: Chunked dimension of each value
    cuts: dict[int, Cut]  #: Parts of arguments for a chunk of each value


CutOf = Callable[[int, int], Cut | None]  #: Function from a value and a dimension to the rule's result


def cuts_of(graph: Graph) -> CutOf:
    """Return a cached :func:`~fastfold.memory.chunking.flow.find_cut` for the operations of a graph's values."""
    return functools.cache(lambda value, dim: find_cut(graph, graph.operation(value), dim))


def dissolved(steps: Sequence[Step]) -> list[int]:
    """Return the operations of some steps, each once, including those inside loops."""
    return list(
        dict.fromkeys(
            value for step in steps for value in ((step,) if isinstance(step, int) else step.members)
        )
    )


def flow_back(graph: Graph, cut_of: CutOf, span: Sequence[Step], end: int, dim: int) -> Flow | None:
    """Follow a dimension of a value back as far as possible.

    A value needed along two dimensions, or as a whole, is computed before the loop, and so are its inputs. Steps of
    ``span`` may take part, but loops do not; ``end`` is the chunked value of one of them.
    """
    layout = graph.layouts[end]
    if not isinstance(layout, ChunkLayout):
        return None
    wanted: dict[int, set[int | None]] = {end: {dim}}
    flow = Flow(end, layout.shape[dim], {}, {})
    for step in reversed(span):
        if not isinstance(step, int) or step not in wanted:
            continue
        dims = wanted[step]
        own = next(iter(dims))
        if len(dims) > 1 or own is None:
            continue
        cut = cut_of(step, own)
        if cut is None:
            continue
        flow.dims[step], flow.cuts[step] = own, cut
        for path, index in graph.operation(step).values():
            wanted.setdefault(index, set()).add(cut.dims.get(path))
    return flow if end in flow.dims else None


def make_loop(graph: Graph, span: Sequence[Step], flow: Flow, needed: Iterable[int]) -> list[Step]:
    """Convert the part of consecutive steps that belongs to a flow to a loop.

    The steps of ``span`` are consecutive; later steps or the caller use the values ``needed``.

    Returns:
        Steps that the loop uses, the loop, and the remaining steps. A value that is also needed as a whole is computed
        twice. The steps are unchanged if a loop is not possible.
    """
    members = _used(graph, [step for step in span if isinstance(step, int) and step in flow.dims], flow.end)
    cuts = {member: flow.cuts[member] for member in members}
    read: dict[int, set[int | None]] = {}
    for member in members:
        for path, index in graph.operation(member).values():
            if index not in cuts:
                read.setdefault(index, set()).add(cuts[member].dims.get(path))
    before = _demanded(graph, span, read)
    present = {value for step in before for value in computed_values(step)}
    skipped = cuts.keys() | present
    after = _demanded(graph, [step for step in span if skipped.isdisjoint(computed_values(step))], needed)
    wanted = set(needed).union(*(used_values(graph, step) for step in after))
    outputs = tuple(m for m in members if m == flow.end or (m in wanted and m not in present))
    if not all(isinstance(graph.layouts[output], ChunkLayout) for output in outputs):
        return list(span)  # several results cannot be assembled at once
    loop = Loop(
        members=tuple(members),
        dims={member: flow.dims[member] for member in members},
        cuts=cuts,
        outputs=outputs,
        length=flow.length,
        read={value: frozenset(dims) for value, dims in read.items()},
    )
    return [*before, loop, *after]


def _demanded(graph: Graph, span: Sequence[Step], values: Iterable[int]) -> list[Step]:
    """Return the steps from which some values are computed."""
    wanted = set(values)
    demanded: list[Step] = []
    for step in reversed(span):
        if not wanted.isdisjoint(computed_values(step)):
            demanded.append(step)
            wanted.update(used_values(graph, step))
    return demanded[::-1]


def _used(graph: Graph, inside: list[int], end: int) -> list[int]:
    """Return the operations from which the end value is computed."""
    wanted = {end}
    operations: list[int] = []
    for value in reversed(inside):
        if value in wanted:
            operations.insert(0, value)
            wanted.update(graph.operation(value).inputs)
    return operations


@dataclass(frozen=True)
class Chosen:
    """Result of a search."""

    profile: Profile
    target: int  #: Bytes that the steps should fit

    @property
    def fits(self) -> bool:
        """True if the estimated peak is within the target."""
        return self.profile.peak <= self.target


_Rank = tuple[int, float, int]


@dataclass(frozen=True)
class _Region:
    """Context of a region."""

    start: StepState  #: Live values before it
    needed: set[int]  #: Values used after it
    target: int
    once: float  #: Work of its operations without repetition


@dataclass(frozen=True)
class _Candidate:
    """Region from step ``begin`` to ``end``, and the steps in its place."""

    is_outside: bool  #: True if the step at the peak is not in its loop
    rank: _Rank
    begin: int
    end: int
    span: list[Step]
    region: _Region


class Search:
    """Search for regions of one graph.

    Args:
        memory: Memory of the graph.
        donate: True if inputs may be overwritten.
        seconds: Processor time after which the search ends with the regions that it has.
        report: Called with the peak in bytes after each region.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        donate: bool,
        seconds: float = math.inf,
        report: Callable[[int], None] = lambda peak: None,
    ) -> None:
        self.memory, self.donate, self._report = memory, donate, report
        self._end = time.thread_time() + seconds
        self._cut_of = cuts_of(memory.graph)
        self._known_work: dict[int, float] = {}
        self._whole: tuple[Step, ...] = tuple(operation.index for operation in memory.graph.operations)

    @property
    def is_over(self) -> bool:
        """True if the time has ended."""
        return time.thread_time() > self._end

    def unchunked(self) -> Chosen:
        """Return all operations without chunks."""
        return Chosen(profile(self.memory, self._whole, donate=self.donate), 0)

    def choose(self, target: int, steps: Sequence[Step] | None = None) -> Chosen:
        """Choose regions and numbers of chunks that fit the target in bytes, or come closest.

        The search goes on from ``steps``, by default from all operations without chunks.
        """
        chosen = self.fewest_chunks(self._whole if steps is None else steps, target)
        while not chosen.fits:
            better = self._improve(chosen.profile, target)
            if better is None:
                break
            changed = self.fewest_chunks(better, target)
            # Values that live longer can cost more at another step than the region saves.
            if _height(changed.profile) >= _height(chosen.profile):
                break
            chosen = changed
            self._report(chosen.profile.peak)
        return chosen

    def fewest_chunks(self, steps: Sequence[Step], target: int) -> Chosen:
        """Return the steps with the smallest number of chunks per loop that fits the target."""
        profiled = profile(self.memory, steps, donate=self.donate)
        with_chunks = [
            step if isinstance(step, int) else self._with_chunks(step, target - outside)
            for step, outside in zip(profiled.steps, profiled.outside, strict=True)
        ]
        return Chosen(profile(self.memory, with_chunks, donate=self.donate), target)

    def _with_chunks(self, loop: Loop, room: int) -> Loop:
        inner = inner_bytes(self.memory, loop)
        size = max(1, min(loop.length, room * loop.length // max(inner, 1)))
        return replace(loop, chunks=-(-loop.length // size))

    def _improve(self, profiled: Profile, target: int) -> list[Step] | None:
        """Add one more region around the largest peak; return None if none helps."""
        steps = profiled.steps
        current = profile(self.memory, steps, donate=self.donate, states=True)
        best: _Candidate | None = None
        for window in _WINDOWS:
            best = self._best_region(steps, current, target, window)
            if self.is_over or (best is not None and best.rank[0] <= target):
                break
        return None if best is None else [*steps[: best.begin], *best.span, *steps[best.end + 1 :]]

    def _best_region(
        self, steps: Sequence[Step], current: Profile, target: int, window: int
    ) -> _Candidate | None:
        """Return the best region of at most ``window`` steps before and after the largest peak."""
        top = max(range(len(steps)), key=lambda number: current.peaks[number])
        first, last = max(0, top - window), min(len(steps) - 1, top + window)
        needed, at_peak = self._needed(steps), set(dissolved([steps[top]]))
        candidates: list[_Candidate] = []
        for end in range(top, last + 1):
            flat = dissolved(steps[first : end + 1])
            for value, dim in self._ends(steps[end]):
                flow = None if self.is_over else flow_back(self.memory.graph, self._cut_of, flat, value, dim)
                if flow is None:
                    continue
                is_outside = at_peak.isdisjoint(flow.dims)
                for begin in self._beginnings(steps, current, flow, range(first, end + 1), top):
                    inside = dissolved(steps[begin : end + 1])
                    once = sum(map(self._work, inside))
                    region = _Region(current.states[begin], needed[end], target, once)
                    span = make_loop(self.memory.graph, inside, flow, region.needed)
                    candidates.append(
                        _Candidate(is_outside, self._rank(span, region), begin, end, span, region)
                    )
        # Refinement takes most of the time, so only the most promising regions are refined.
        best: _Candidate | None = None
        for candidate in heapq.nsmallest(
            _REFINED, candidates, key=lambda c: (c.is_outside, c.rank, c.begin, c.end)
        ):
            rank, span = self._refined(candidate.span, candidate.region)
            if rank[0] < current.peaks[top] and (best is None or rank < best.rank):
                best = replace(candidate, rank=rank, span=span)
        return best

    def _ends(self, step: Step) -> list[tuple[int, int]]:
        """Return the values at which a region may end with this step, with their dimensions."""
        ends = []
        for value in computed_values(step):
            layout, source = self.memory.graph.layouts[value], self.memory.alias[value]
            # A view costs nothing, unless it is a part of something larger.
            if not isinstance(layout, ChunkLayout):
                continue
            if source is None or layout.nbytes < self.memory.graph.layout(source).nbytes:
                ends += [(value, dim) for dim, length in enumerate(layout.shape) if length > 1]
        return ends

    def _needed(self, steps: Sequence[Step]) -> list[set[int]]:
        """Return, for each step, the values that later steps or the caller use."""
        needed, after = [], set(self.memory.graph.output_indices())
        for step in reversed(steps):
            needed.append(set(after))
            after.update(used_values(self.memory.graph, step))
        return needed[::-1]

    def _beginnings(
        self, steps: Sequence[Step], current: Profile, flow: Flow, span: range, top: int
    ) -> list[int]:
        """Return the places before the peak where a loop may begin, those with the fewest live bytes."""
        beginnings = [
            number
            for number in span
            if number <= top and any(value in flow.dims for value in dissolved([steps[number]]))
        ]
        return heapq.nsmallest(
            _BEGINNINGS, beginnings, key=lambda number: (current.states[number].live, -number)
        )

    def _refined(self, span: list[Step], region: _Region) -> tuple[_Rank, list[Step]]:
        """Return the rank and steps of a region. Its largest whole input is computed in loops too."""
        best = self._rank(span, region)
        for number in range(len(span)):
            loop = span[number]
            if isinstance(loop, Loop):
                break
        else:
            return best, span
        before = {value for step in span[:number] for value in computed_values(step)}
        for value in loop.read:
            layout = self.memory.graph.layouts[value]
            if best[0] <= region.target or value not in before or not isinstance(layout, ChunkLayout):
                continue
            for dim, length in enumerate(layout.shape):
                place = next((n for n, step in enumerate(span) if step == value), None)
                if length < 2 or place is None:
                    continue
                flow = flow_back(self.memory.graph, self._cut_of, span[: place + 1], value, dim)
                if flow is None:
                    continue
                later = set(region.needed).union(
                    *(used_values(self.memory.graph, s) for s in span[place + 1 :])
                )
                changed = [*make_loop(self.memory.graph, span[: place + 1], flow, later), *span[place + 1 :]]
                rank = self._rank(changed, region)
                if rank < best:
                    best, span = rank, changed
        return best, span

    def _rank(self, span: list[Step], region: _Region) -> _Rank:
        """Rank a region by its peak, its repeated work, and the number of chunks."""
        profiled = profile(self.memory, span, donate=self.donate, start=region.start, needed=region.needed)
        peak = chunks = 0
        for number, step in enumerate(profiled.steps):
            if isinstance(step, int):
                peak = max(peak, profiled.peaks[number])
                continue
            loop = self._with_chunks(step, region.target - profiled.outside[number])
            inner = -(-inner_bytes(self.memory, step) * loop.size // loop.length)
            peak = max(peak, profiled.outside[number] + inner)
            chunks += loop.chunks * len(loop.members)
        work = sum(
            self._work(value)
            for step in span
            for value in ((step,) if isinstance(step, int) else step.members)
        )
        return max(peak, region.target), work - region.once, chunks

    def _work(self, value: int) -> float:
        """Return the work of an operation, in computed or, for a product, multiplied elements."""
        if value not in self._known_work:
            graph = self.memory.graph
            operation = graph.operation(value)
            elements = graph.layout(value).nbytes / graph.layout(value).dtype.itemsize
            if operation.name.removeprefix("aten::") in _PRODUCTS:
                elements *= max(graph.layout(index).shape[-1] for index in operation.inputs)
            self._known_work[value] = elements if self.memory.alias[value] is None else 0.0
        return self._known_work[value]


def _height(profiled: Profile) -> tuple[int, int]:
    """Return the largest peak, and the number of steps that reach it."""
    return profiled.peak, profiled.peaks.count(profiled.peak)
