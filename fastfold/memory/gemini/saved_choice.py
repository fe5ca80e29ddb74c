"""Choose the saved tensors that stay on the device, and the free memory for the others' return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastfold.memory.gemini.access_trace import SpanKey, Trace
from fastfold.memory.planner.planner import choose_spans
from fastfold.memory.planner.schedule import Access, Chunk, smallest_budget


def choose_kept(
    trace: Trace, sizes: Mapping[Chunk, int], budget: int, *, early: bool, volatile: frozenset[Chunk]
) -> frozenset[SpanKey]:
    """Choose the saved tensors that stay, in competition with the chunks.

    All were offloaded in the recorded cycle. ``early`` leaves room for early returns (:func:`reserve`). Device copies
    of ``volatile`` chunks are invalid at the end of a cycle.
    """
    kept = _choose(trace, sizes, budget, volatile)
    room = reserve(trace, kept, trace.accesses, sizes, budget) if early else 0
    return _choose(trace, sizes, budget - room, volatile) if room else kept


def reserve(
    trace: Trace,
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


def _choose(
    trace: Trace, sizes: Mapping[Chunk, int], budget: int, volatile: frozenset[Chunk]
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
