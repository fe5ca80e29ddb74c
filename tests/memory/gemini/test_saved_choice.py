"""What stays of saved tensors: within the budget, and with room for one of those that leave."""

from __future__ import annotations

import pytest

from fastfold.memory import Access, Span, smallest_budget, with_spans
from fastfold.memory.gemini.access_trace import AccessTrace, SpanKey
from fastfold.memory.gemini.executor import choose_kept, reserve

SIZES = {0: 10, 1: 10, 2: 10}
SPANS: dict[SpanKey, Span] = {("saved", -1, i): Span(size, i, 5 - i) for i, size in enumerate((8, 6, 4))}


def trace(spans: dict[SpanKey, Span]) -> AccessTrace:
    """Three operators forward and back."""
    accesses = tuple(Access(frozenset({i}), 5) for i in (0, 1, 2, 2, 1, 0))
    return AccessTrace((), (), (), accesses, (0,) * 6, spans)


@pytest.mark.parametrize("budget", range(15, 60, 3))
@pytest.mark.parametrize("early", [False, True])
def test_what_stays_fits_together_with_the_room_that_is_left_free(budget: int, early: bool) -> None:
    cycle = trace(SPANS)
    kept = choose_kept(cycle, SIZES, budget, early=early, volatile=frozenset())
    accesses = with_spans(cycle.accesses, [SPANS[key] for key in kept])
    room = reserve(cycle, kept, accesses, SIZES, budget)
    assert smallest_budget(accesses, SIZES) + room <= budget
    away = [span.size for key, span in SPANS.items() if key not in kept]
    if early and away and budget >= 15 + min(SPANS[key].size for key in SPANS):
        assert room >= min(away), "room for one of those that left"


def test_without_early_returns_no_room_is_left_for_them() -> None:
    """One of two fits where nothing is to be left free, and makes way where something is."""
    cycle = trace({("saved", -1, 0): Span(6, 2, 3), ("saved", -1, 1): Span(6, 0, 5)})
    late, soon = (choose_kept(cycle, SIZES, 21, early=early, volatile=frozenset()) for early in (False, True))
    assert len(late) == 1
    assert soon == frozenset()


def test_a_block_is_not_kept_without_its_inputs() -> None:
    spans: dict[SpanKey, Span] = {("saved", 1, 0): Span(1000, 0, 5), ("block", 1, 0): Span(2, 1, 4)}
    assert choose_kept(trace(spans), SIZES, 60, early=False, volatile=frozenset()) == frozenset()
    spans[("saved", 1, 0)] = Span(3, 0, 5)
    assert choose_kept(trace(spans), SIZES, 60, early=False, volatile=frozenset()) == spans.keys()
