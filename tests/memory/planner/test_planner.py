"""The planner: budget kept, accesses served, loads near the optimum, refusals that help."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.memory import Access, BudgetError, Plan, plan, smallest_budget
from tests.helpers.optimal_planner import optimal_traffic


def accesses(*groups: tuple[int, ...], other: int = 0) -> list[Access]:
    return [Access(frozenset(g), other) for g in groups]


def forward_backward(blocks: int) -> list[Access]:
    """Blocks in order, and back."""
    order = [*range(blocks), *reversed(range(blocks))]
    return accesses(*((b,) for b in order))


def four_recycles(blocks: int) -> list[Access]:
    """An embedding, then four passes over the blocks, then a head."""
    return accesses((0,), *((b,) for _ in range(4) for b in range(1, blocks)), (0,))


@st.composite
def problems(
    draw: st.DrawFn, equal: bool = False
) -> tuple[list[Access], dict[int, int], int, frozenset[int]]:
    count = draw(st.integers(2, 6))
    size = st.just(4) if equal else st.integers(1, 9)
    sizes = {c: draw(size) for c in range(count)}
    groups = draw(st.lists(st.frozensets(st.integers(0, count - 1), max_size=2), min_size=1, max_size=12))
    trace = [Access(g, draw(st.integers(0, 6))) for g in groups]
    budget = smallest_budget(trace, sizes) + draw(st.integers(0, 20))
    return trace, sizes, budget, draw(st.frozensets(st.integers(0, count - 1)))


def replay(
    trace: list[Access], sizes: dict[int, int], made: Plan, volatile: frozenset[int], cycles: int
) -> int:
    """Obeys the plan literally; fails on anything impossible. Returns the highest use of memory."""
    resident: set[int] = set()
    peak = 0
    for index in range(cycles):
        for access, step in zip(trace, made.cycle(index), strict=True):
            assert resident >= set(step.evict), "evicts what is not there"
            assert not access.chunks & set(step.evict), "evicts what is needed at this access"
            resident -= set(step.evict)
            for chunk in (*step.load, *step.prefetch):
                assert chunk not in resident, "loads what is there"
                resident.add(chunk)
            assert access.chunks <= resident - set(step.prefetch), "an access finds its chunks missing"
            assert resident == step.resident, "the plan's own account is wrong"
            peak = max(peak, sum(sizes[c] for c in resident) + access.other)
        resident -= volatile
    return peak


@given(problems(), st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_never_over_budget_and_every_access_finds_its_chunks(problem, lookahead):
    """Obeyed literally for many cycles, a plan is possible, within budget, and its account of the peak is exact."""
    trace, sizes, budget, volatile = problem
    made = plan(trace, sizes, budget, volatile=volatile, lookahead=lookahead)
    peak = replay(trace, sizes, made, volatile, cycles=len(made.cycles) + 3)
    assert peak == made.peak <= budget


@given(problems(), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_prefetching_changes_no_load(problem, lookahead):
    """Loads that start early are the same loads."""
    trace, sizes, budget, volatile = problem
    early = plan(trace, sizes, budget, volatile=volatile, lookahead=lookahead)
    late = plan(trace, sizes, budget, volatile=volatile, lookahead=0)
    assert early.loads == late.loads
    assert not any(step.prefetch for cycle in late.cycles for step in cycle)


@given(problems(equal=True))
@settings(max_examples=60, deadline=None)
def test_chunks_of_one_size_load_no_more_than_the_optimum(problem):
    """Farthest next use is optimal for chunks of one size, whatever the trace, within 5% of the best endless plan."""
    trace, sizes, budget, volatile = problem
    best = optimal_traffic(trace, sizes, budget, volatile)
    assert best - 1e-9 <= plan(trace, sizes, budget, volatile=volatile).traffic <= 1.05 * best + 1e-9


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("make", [forward_backward, four_recycles])
def test_named_schedules_load_within_five_percent_of_the_optimum(make, room, changed):
    """Forward and backward, and four recycles, with and without an optimizer that changes the chunks."""
    trace, sizes = make(7), dict.fromkeys(range(7), 10)
    volatile = frozenset(sizes) if changed else frozenset()
    best = optimal_traffic(trace, sizes, 10 * room, volatile)
    assert plan(trace, sizes, 10 * room, volatile=volatile).traffic <= 1.05 * best + 1e-9


@pytest.mark.long
@pytest.mark.parametrize("make", [forward_backward, four_recycles])
@given(data=st.data())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_chunks_of_many_sizes_load_within_five_percent_of_the_optimum(make, data):
    """The named schedules with chunks of any sizes and any budget, where farthest next use alone is not the rule."""
    sizes = {c: data.draw(st.integers(1, 20)) for c in range(6)}
    trace = make(6)
    budget = data.draw(st.integers(smallest_budget(trace, sizes), sum(sizes.values())))
    volatile = frozenset(sizes) if data.draw(st.booleans()) else frozenset()
    best = optimal_traffic(trace, sizes, budget, volatile)
    assert best - 1e-9 <= plan(trace, sizes, budget, volatile=volatile).traffic <= 1.05 * best + 1e-9


@given(problems())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_problem_stays_near_the_optimum(problem):
    """Random traces, sizes and activations: within a tenth of the best endless plan."""
    trace, sizes, budget, volatile = problem
    best = optimal_traffic(trace, sizes, budget, volatile)
    assert best - 1e-9 <= plan(trace, sizes, budget, volatile=volatile).traffic <= 1.1 * best + 1e-9


def test_what_is_used_soon_again_stays():
    """Turning round at the end of the forward pass, the last blocks are still there."""
    made = plan(forward_backward(4), dict.fromkeys(range(4), 1), 2, volatile=frozenset(range(4)), lookahead=0)
    assert made.loads == 6
    assert made.cycle(0)[4].load == ()


def test_prefetch_starts_before_the_use():
    """With room for one chunk more than an access needs, every load but the first starts early."""
    trace = accesses((0,), (1,), (2,), (3,))
    made = plan(trace, dict.fromkeys(range(4), 1), 2, volatile=frozenset(range(4)), lookahead=1)
    assert [step.prefetch for step in made.cycle(0)] == [(1,), (2,), (3,), ()]


def test_activations_push_chunks_out():
    """Memory of other things is no room for chunks at that access, and only there."""
    trace = [Access(frozenset({0}), 0), Access(frozenset({1}), 8), Access(frozenset({0}), 0)]
    assert 0 in plan(trace, {0: 2, 1: 2}, 12).cycle(1)[1].resident
    assert 0 not in plan(trace, {0: 2, 1: 2}, 11).cycle(1)[1].resident


def test_too_small_a_budget_is_refused_with_the_smallest_that_works():
    """The refusal names the operator's need; that budget works and one byte less does not."""
    trace, sizes = [Access(frozenset({0}), 3), Access(frozenset({0, 1}), 5)], {0: 10, 1: 20}
    with pytest.raises(BudgetError, match="smallest budget that works is 35 bytes") as caught:
        plan(trace, sizes, 34)
    assert caught.value.smallest == 35
    assert plan(trace, sizes, 35).peak == 35


def test_equal_arguments_give_equal_plans():
    """Ranks that agree on the trace agree on every decision, in whatever order sets were filled."""
    trace, sizes = four_recycles(6), dict.fromkeys(range(6), 3)
    again = [Access(frozenset(sorted(a.chunks, reverse=True)), a.other) for a in trace]
    assert plan(trace, sizes, 10) == plan(again, dict(reversed(sizes.items())), 10)
