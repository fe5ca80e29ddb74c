"""Execute the plan during a step, and react if the step differs from it.

While accesses match the plan, its evictions, loads and prefetches are executed. After a loop of another length than
recorded, such as recycling, the plan goes on where the loop ends. If a step differs (the first one, or one of other
modules), all idle chunks are evicted, each operator loads its chunks, and the accesses are recorded for the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from fastfold.errors import ConfigError
from fastfold.memory.gemini.access_trace import (
    REMEMBERED,
    AccessRecorder,
    AccessTrace,
    PassKey,
    SpanKey,
    TraceBook,
)
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import ChunkState
from fastfold.memory.planner.planner import choose_spans, early_returns, plan, with_spans
from fastfold.memory.planner.schedule import (
    Access,
    AccessStep,
    Chunk,
    NextUse,
    Plan,
    Span,
    choose_evictions,
    smallest_budget,
)

# A loop that never steps the optimizer must not be recorded endlessly.
_MAX_ACCESSES = 100_000
# A step that follows a measured trace is measured again after this number of steps, twice as many, and so on, because
# counting tensors takes time.
_MEASURED = 16


def choose_kept(
    trace: AccessTrace, sizes: Mapping[Chunk, int], budget: int, *, early: bool, volatile: frozenset[Chunk]
) -> frozenset[SpanKey]:
    """Choose the saved tensors that stay, in competition with the chunks.

    They were offloaded in the recorded cycle. ``early`` leaves room for early returns (:func:`reserve`). Device copies
    of ``volatile`` chunks are invalid at the end of a cycle.
    """
    kept = _choose_spans(trace, sizes, budget, volatile)
    room = reserve(trace, kept, trace.accesses, sizes, budget) if early else 0
    return _choose_spans(trace, sizes, budget - room, volatile) if room else kept


def reserve(
    trace: AccessTrace,
    kept: frozenset[SpanKey],
    accesses: Sequence[Access],
    sizes: Mapping[Chunk, int],
    budget: int,
) -> int:
    """Return the bytes to leave free so that an offloaded tensor can return before its use.

    That is the size of the largest offloaded tensor for which every operator has room: offloading one more tensor costs
    less than waiting for all of them. The accesses include the tensors that stay; sizes and budget are in bytes.
    """
    room = budget - smallest_budget(accesses, sizes)
    away = [span.size for key, span in trace.spans.items() if key[0] == "saved" and key not in kept]
    return max((size for size in away if size <= room), default=0)


def _choose_spans(
    trace: AccessTrace, sizes: Mapping[Chunk, int], budget: int, volatile: frozenset[Chunk]
) -> frozenset[SpanKey]:
    keys = sorted(trace.spans)
    spans = [trace.spans[key] for key in keys]
    kept = frozenset(keys[i] for i in choose_spans(trace.accesses, sizes, budget, spans, volatile=volatile))
    # A block's saved tensors are useful only with its inputs.
    return kept - {
        key
        for key in kept
        if key[0] == "block" and any(k[:2] == ("saved", key[1]) and k not in kept for k in keys)
    }


class _Cycle:
    """Cycle in progress: recorded accesses and the expected trace."""

    def __init__(self) -> None:
        self.recorder = AccessRecorder()
        self.measured = True
        self.trace: AccessTrace | None = None
        self.position = 0
        self.next_use: NextUse | None = None
        self.steps: tuple[AccessStep, ...] | None = None
        self.before: frozenset[int] = frozenset()
        self.kept: frozenset[SpanKey] = frozenset()
        self.returns: Mapping[int, Sequence[SpanKey]] = {}
        self.due: dict[SpanKey, Span] = {}


class Residency:
    """Controller of chunk residency at each access.

    Args:
        store: Chunks of the model.
        budget: Bytes on the device.
        keep: True to keep idle chunks while there is room; otherwise each is evicted after its use.
        lookahead: Largest number of accesses by which a load may precede its use.
        agree: Called by :meth:`exchange` with the traces of a training step; returns those of all ranks in one order.
            None for one rank.

    Attributes:
        book: Recorded cycles.
        planned: Number of accesses that followed the plan.
        reacted: Number of accesses without a plan.
        waited: Number of loads that began at the access that needed them.
    """

    def __init__(
        self,
        store: ChunkStore,
        budget: int,
        keep: bool,
        lookahead: int,
        agree: Callable[[list[AccessTrace]], list[AccessTrace]] | None = None,
    ) -> None:
        self.store, self.budget, self.keep, self.lookahead = store, budget, keep, lookahead
        self.book = TraceBook()
        self.planned = self.reacted = self.waited = 0
        self._agree = agree
        self._pending: list[AccessTrace] = []
        self._followed = 0
        self._step = _Cycle()
        self._evaluation: _Cycle | None = None
        self._plans: dict[tuple[PassKey, ...], tuple[AccessTrace, Plan, int]] = {}
        self._kept: dict[tuple[PassKey, ...], tuple[AccessTrace, frozenset[SpanKey]]] = {}
        self._pins: dict[int, int] = {}
        self._sizes = {c.index: c.nbytes for c in store.chunks}
        self._trainable = frozenset(c.index for c in store.chunks if c.trainable)

    @property
    def pinned(self) -> frozenset[int]:
        """Chunks that operators are using."""
        return frozenset(self._pins)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plan of each cycle that was repeated."""
        return tuple(entry[1] for entry in self._plans.values())

    def begin_pass(self, key: PassKey, elements: int) -> None:
        """Begin a call from outside the model; no other call is running."""
        self.interrupt()
        if key.evaluation:
            self._evaluation = _Cycle()
            self._evaluation.measured = self._step.measured
        elif len(self._step.recorder) > _MAX_ACCESSES:
            self.end_step()
        cycle = self._evaluation or self._step
        if len(cycle.recorder):
            cycle.recorder.measured(self.store.device.mark())
        cycle.recorder.begin(key, elements)
        if self.store.fixed or not self.keep:
            return
        keys = cycle.recorder.keys
        if cycle.trace is None or not self._goes_on(cycle):
            cycle.trace = self.book.expect(keys, cycle.recorder.elements)
            cycle.steps, cycle.kept, cycle.returns = None, frozenset(), {}
            if cycle.trace is not None:
                cycle.kept = self._choose(cycle, cycle.trace)
                cycle.position = cycle.trace.starts[len(keys) - 1]
                cycle.next_use = NextUse(cycle.trace.accesses, self._volatile(cycle))
                if len(keys) == 1:
                    self._take_plan(cycle, cycle.trace)
                    if cycle is self._step:
                        cycle.measured = self.store.device.count(self._is_due(cycle, cycle.trace))

    def _is_due(self, cycle: _Cycle, trace: AccessTrace) -> bool:
        """Return True if a step that follows a trace is to be measured."""
        if self.store.device.other_bytes() > trace.before[0]:
            return True
        if trace.keys[0] != cycle.recorder.keys[0]:
            return False  # the trace of other numbers or larger shapes stays
        rounds, rest = divmod(self._followed, _MEASURED)
        return cycle.kept != trace.kept or (rest == 0 and rounds.bit_count() < 2)

    def forget_cycle(self) -> None:
        """Do not store the cycle in progress: its operators use other chunks at the next call."""
        (self._evaluation or self._step).measured = False

    def interrupt(self) -> None:
        """Release the chunks left in use by a pass that raised."""
        for index in list(self._pins):
            self._release(index, self._pins[index])
        self._call_off()

    def _goes_on(self, cycle: _Cycle) -> bool:
        """Return True if this pass is next in the expected cycle, and not larger than expected."""
        assert cycle.trace is not None
        index = len(cycle.recorder.keys) - 1
        return (
            index < len(cycle.trace.keys)
            and cycle.trace.keys[index].serves(cycle.recorder.keys[index])
            and cycle.trace.elements[index] >= cycle.recorder.elements[index]
            and cycle.trace.starts[index] == cycle.position
        )

    def _volatile(self, cycle: _Cycle) -> frozenset[int]:
        return self._trainable if cycle is self._step else frozenset()

    def _choose(self, cycle: _Cycle, trace: AccessTrace) -> frozenset[SpanKey]:
        """Choose the saved tensors that stay on the device: those of the trace, and others where there is room."""
        known, kept = self._kept.get(trace.keys, (None, frozenset()))
        if known is not trace:
            offloaded = {key: span for key, span in trace.spans.items() if key not in trace.kept}
            kept = trace.kept | choose_kept(
                replace(trace, spans=offloaded),
                self._sizes,
                self.budget,
                early=self.lookahead > 0,
                volatile=self._volatile(cycle),
            )
            if len(self._kept) > REMEMBERED:
                self._kept.clear()
            self._kept[trace.keys] = (trace, kept)
        return kept

    def _take_plan(self, cycle: _Cycle, trace: AccessTrace) -> None:
        """Take the plan's next cycle for this trace, including saved tensors."""
        accesses = with_spans(trace.accesses, [trace.spans[key] for key in cycle.kept - trace.kept])
        self._next_cycle(cycle, trace, accesses)
        assert cycle.steps is not None
        away = {key: trace.spans[key] for key in trace.spans.keys() - cycle.kept if key[0] == "saved"}
        cycle.returns = early_returns(cycle.steps, accesses, away, self._sizes, self.budget, self.lookahead)

    def _next_cycle(self, cycle: _Cycle, trace: AccessTrace, accesses: Sequence[Access]) -> None:
        """Take the plan's next cycle for this trace; plan again if the resident chunks differ."""
        resident, volatile = self.store.resident, self._volatile(cycle)
        known, made, index = self._plans.get(trace.keys, (None, None, 0))
        if made is not None and known is trace:
            before = made.cycle(index - 1)[-1].resident - volatile
            if before == resident:
                self._plans[trace.keys] = (trace, made, index + 1)
                cycle.steps, cycle.before = made.cycle(index), before
                return
        room = reserve(trace, cycle.kept, accesses, self._sizes, self.budget) if self.lookahead else 0
        made = plan(
            accesses,
            self._sizes,
            self.budget - room,
            volatile=volatile,
            resident=resident,
            lookahead=self.lookahead,
        )
        if len(self._plans) > REMEMBERED:
            self._plans.clear()
        self._plans[trace.keys] = (trace, made, 1)
        cycle.steps, cycle.before = made.cycle(0), resident

    # Saved tensors, the interface `fastfold.memory.gemini.activations.Ledger`

    def new_call(self) -> int:
        """Return the number of a block's call in this step."""
        self._step.recorder.calls += 1
        return self._step.recorder.calls

    def stays(self, key: SpanKey, size: int) -> bool:
        """Return True if a new saved tensor of ``size`` bytes stays on the device."""
        cycle = self._step
        cycle.recorder.saved(key, size)
        # More than planned may not fit; the size of a block's saved tensors is known only afterwards.
        expected = cycle.trace.spans.get(key) if cycle.trace is not None else None
        kept = key in cycle.kept and (expected is None or size <= expected.size)
        if kept:
            cycle.recorder.kept.add(key)
        return kept

    def resize(self, key: SpanKey, size: int) -> None:
        """Record the size of a block's saved tensors, measured when it was recomputed."""
        self._step.recorder.saved(key, size)

    def used(self, key: SpanKey) -> None:
        """Record that the backward pass uses a tensor."""
        self._step.recorder.used(key)
        self._step.due.pop(key, None)

    def due(self) -> Mapping[SpanKey, int]:
        """Return the tensors to bring back now, with the free bytes."""
        due, self._step.due = self._step.due, {}
        return {key: span.size for key, span in due.items()}

    def end_pass(self) -> None:
        """End a call from outside the model."""
        if self._evaluation is not None:
            self._close(self._evaluation)
            self._evaluation = None

    def end_step(self) -> None:
        """End the cycle, when the optimizer steps or gradients are read or cleared."""
        if self._step.recorder.keys:
            self._close(self._step)
            self._followed = 0 if self._step.trace is None else self._followed + 1
            self.store.device.count(True)
            self._step = _Cycle()

    def _call_off(self) -> None:
        self._step.due.clear()
        self.store.device.call_off()

    def _close(self, cycle: _Cycle) -> None:
        self._call_off()
        cycle.recorder.measured(self.store.device.mark())
        trace = cycle.recorder.trace()
        # A step that has followed the trace of other numbers or larger shapes needs none of its own.
        is_served = (
            cycle.trace is not None
            and cycle.trace.keys != trace.keys
            and len(cycle.trace.keys) == len(trace.keys)
        )
        if cycle.measured and not is_served and len(cycle.recorder):
            # One rank may evaluate alone, so evaluations are not exchanged.
            if self._agree is not None and cycle is self._step:
                self._pending.append(trace)
            else:
                self.book.keep(trace)

    def exchange(self) -> None:
        """Share recorded traces, and the largest memory, between all ranks."""
        self.end_step()
        if self._agree is not None:
            pending, self._pending = self._pending, []
            for trace in self._agree(pending):
                self.book.keep(trace)

    def pin(self, chunks: tuple[int, ...], release: tuple[int, ...] = ()) -> None:
        """Begin an operator, keep its chunks until they are released, and release those of ended ones.

        Raises:
            ConfigError: Parameters are plain tensors on the host.
        """
        if chunks and self.store.on_host:
            raise ConfigError(
                "leave params_on_host() before the next pass: modules need their parameters on the device"
            )
        for index in release:
            self._release(index)
        new = [index for index in dict.fromkeys(chunks) if index not in self._pins]
        self._visit(self.pinned | set(new))
        for index in chunks:
            self._pins[index] = self._pins.get(index, 0) + 1
        for index in new:
            self.store.wait(index)
            self.store.chunks[index].become(ChunkState.COMPUTE)

    def _release(self, index: int, times: int = 1) -> None:
        self._pins[index] -= times
        if not self._pins[index]:
            del self._pins[index]
            self.store.chunks[index].idle()

    def _visit(self, needed: frozenset[int]) -> None:
        """Execute one access: evictions, loads and prefetches."""
        cycle = self._evaluation or self._step
        cycle.recorder.measured(self.store.device.mark())
        other_bytes = self.store.device.other_bytes()
        cycle.recorder.access(needed, other_bytes)
        if self.store.fixed:
            return
        resident, trace = self.store.resident, cycle.trace
        position = None if trace is None else trace.place(cycle.position, needed, torch.is_grad_enabled())
        if trace is None or position is None:
            cycle.trace = None
            self.reacted += 1
            self._call_off()
            self._move(tuple(resident - needed), tuple(needed - resident))
            return
        if position != cycle.position and cycle.steps is not None and position > 0:
            cycle.before = cycle.steps[position - 1].resident
        cycle.position = position + 1
        # Tensors kept since the recording (a batch, a loss) leave less room than planned.
        other = trace.accesses[position].other + max(0, other_bytes - trace.before[position])
        if cycle.steps is not None:
            step = cycle.steps[position]
            cycle.due |= {key: trace.spans[key] for key in cycle.returns.get(position, ())}
            room = self.budget - other - sum(map(self._sizes.__getitem__, step.resident))
            if room < self.store.device.early_copy_bytes + sum(span.size for span in cycle.due.values()):
                self._call_off()
            as_planned = resident == cycle.before and room >= 0
            cycle.before = step.resident
            if as_planned:
                self.planned += 1
                self._move(step.evict, step.load, step.prefetch)
                after = position + self.lookahead + 1
                for later in cycle.steps[after : after + 1]:
                    self.store.announce(later.load + later.prefetch)
                return
            self._call_off()
        # Another pass, such as an evaluation, has changed the resident chunks: continue with the planner's rule.
        assert cycle.next_use is not None
        evict = choose_evictions(resident, needed, self.budget - other, self._sizes, cycle.next_use, position)
        self._move(evict, tuple(needed - resident))

    def _move(self, evict: tuple[int, ...], load: tuple[int, ...], early: tuple[int, ...] = ()) -> None:
        for index in evict:
            self.store.evict(index)
        for index in load + early:
            self.store.load(index)
        self.waited += len(load)
