"""What stays on the device of what the forward pass saves, and the room in which the rest comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastfold.memory.gemini.access_trace import SpanKey, Trace
from fastfold.memory.planner.planner import choose_spans
from fastfold.memory.planner.schedule import Access, Chunk, smallest_budget


def choose_kept(
    trace: Trace, sizes: Mapping[Chunk, int], budget: int, *, early: bool, volatile: frozenset[Chunk]
) -> frozenset[SpanKey]:
    """What stays, in competition with the chunks for the same room.

    Args:
        trace: One cycle, in which all of it left.
        sizes: Bytes of each chunk.
        budget: Bytes on the device.
        early: Whether to leave room for what comes back before its use (:func:`reserve`).
        volatile: Chunks whose device copy is worthless at the end of a cycle.
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
    """Bytes left free for one of the tensors that have left, so that it comes back before its use.

    One more that leaves costs less than that all of them are waited for.

    Args:
        trace: One cycle.
        kept: What stays.
        accesses: Those of the cycle, with what that takes.
        sizes: Bytes of each chunk.
        budget: Bytes on the device.

    Returns:
        Bytes of the largest of them for which every operator leaves the room.
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
    # A block's saved tensors need its inputs.
    return kept - {
        key
        for key in kept
        if key[0] == "block" and any(k[:2] == ("saved", key[1]) and k not in kept for k in keys)
    }
