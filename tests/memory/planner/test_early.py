"""What begins to come back early: never over the budget, as early as it may where there is room."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.memory import Access, Span, plan
from fastfold.memory.planner.planner import early_returns
from tests.memory.planner.test_planner import problems

Problem = tuple[list[Access], dict[int, int], int, frozenset[int]]


@st.composite
def with_away(draw: st.DrawFn) -> tuple[Problem, dict[int, Span]]:
    """A planner's problem, and what has left between two accesses; at its use it is among the other things."""
    trace, sizes, budget, volatile = draw(problems())
    spans = {}
    for key in range(draw(st.integers(0, 6))):
        first = draw(st.integers(0, len(trace) - 1))
        last = draw(st.integers(first, len(trace) - 1))
        spans[key] = Span(draw(st.integers(1, 8)), first, last)
    return (trace, sizes, budget, volatile), spans


@given(with_away(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_no_access_exceeds_the_budget(given_, lookahead):
    """Counted up to the use itself; nothing begins before it has left, or more than ``lookahead`` accesses early."""
    (trace, sizes, budget, volatile), spans = given_
    cycle = plan(trace, sizes, budget, volatile=volatile, lookahead=lookahead).cycle(0)
    starts = early_returns(cycle, trace, spans, sizes, budget, lookahead)
    began = {key: start for start, keys in starts.items() for key in keys}
    assert sum(map(len, starts.values())) == len(began)
    for key, start in began.items():
        assert spans[key].first < start < spans[key].last
        assert spans[key].last - start <= lookahead
    for position, (access, step) in enumerate(zip(trace, cycle, strict=True)):
        early = sum(spans[key].size for key, start in began.items() if start <= position <= spans[key].last)
        if early:
            assert access.other + sum(sizes[c] for c in step.resident) + early <= budget


def test_with_room_for_all_everything_begins_as_early_as_it_may():
    trace = [Access(frozenset({0}), 1)] * 6
    spans = {"late": Span(1, 0, 5), "middle": Span(1, 1, 3), "next": Span(1, 3, 4)}
    cycle = plan(trace, {0: 1}, 100).cycle(0)
    assert early_returns(cycle, trace, spans, {0: 1}, 100, 2) == {2: ["middle"], 3: ["late"]}
    assert early_returns(cycle, trace, spans, {0: 1}, 100, 0) == {}
    assert early_returns(cycle, trace, spans, {0: 1}, 2, 2) == {}


def test_what_is_used_first_has_the_first_claim():
    trace = [Access(frozenset({0}))] * 6
    cycle = plan(trace, {0: 1}, 4).cycle(0)
    spans = {"second": Span(2, 0, 5), "first": Span(2, 0, 4)}
    assert early_returns(cycle, trace, spans, {0: 1}, 4, 2) == {2: ["first"]}
