"""Block sizes follow from the budget and from what each size costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.memory import BudgetError
from fastfold.memory.block_sizes import (
    BlockedOperator,
    Candidate,
    choose_candidates,
    fit_blocks,
    longest_that_fits,
    measure_blocks,
    smallest_that_works,
)

_WAYS = st.lists(
    st.builds(
        Candidate,
        st.integers(1, 99),
        st.integers(0, 50),
        st.floats(0.0, 9.0),
        host=st.sampled_from([0, 0, 30]),
    ),
    min_size=1,
    max_size=4,
).map(tuple)
_OPERATORS = st.lists(st.tuples(st.integers(0, 50), _WAYS), min_size=1, max_size=3).map(
    lambda found: [
        BlockedOperator(str(i), resident, candidates) for i, (resident, candidates) in enumerate(found)
    ]
)


@settings(max_examples=60, deadline=None)
@given(_OPERATORS, st.integers(0, 100))
def test_no_other_choice_within_the_budget_is_faster(operators: list[BlockedOperator], budget: int) -> None:
    """Compared with every combination of candidates; and a plan is found exactly when the smallest budget says so."""
    fitting = [
        sum(candidate.seconds for candidate in combination)
        for combination in itertools.product(*(o.candidates for o in operators))
        if all(o.resident + w.working <= budget for o, w in zip(operators, combination, strict=True))
    ]
    assert bool(fitting) == (smallest_that_works(operators) <= budget)
    if fitting:
        plan = choose_candidates(operators, budget)
        assert plan.peak <= budget
        assert plan.seconds == pytest.approx(min(fitting))
        assert plan.slow_down >= 1.0
    else:
        with pytest.raises(BudgetError) as caught:
            choose_candidates(operators, budget)
        choose_candidates(operators, caught.value.smallest)
        with pytest.raises(BudgetError):
            choose_candidates(operators, caught.value.smallest - 1)


def test_the_hosts_memory_is_a_budget_too() -> None:
    operator = BlockedOperator("product", 10, (Candidate(8, 1, 2.0, host=100), Candidate(8, 50, 1.0)))
    assert choose_candidates([operator], 20).host == 100
    assert choose_candidates([operator], 60).host == 0
    with pytest.raises(
        BudgetError, match="product needs 60 bytes at once; the smallest budget that works is 60"
    ):
        choose_candidates([operator], 20, host_budget=99)


def test_what_the_budget_costs_is_said() -> None:
    operators = [
        BlockedOperator("a", 0, (Candidate(4, 4, 1.0), Candidate(1, 1, 3.0))),
        BlockedOperator("b", 0, (Candidate(4, 2, 1.0),)),
    ]
    assert choose_candidates(operators, 4).slow_down == 1.0
    assert choose_candidates(operators, 3).slow_down == 2.0


@pytest.mark.parametrize("budget", [0, 1, 99, 100, 10**9])
def test_the_longest_that_fits(budget: int) -> None:
    longest = longest_that_fits(lambda n: n * n, budget, most=5000)
    assert longest * longest <= budget
    assert (longest + 1) ** 2 > budget or longest == 5000


def test_a_line_is_found_again_and_no_part_is_negative() -> None:
    cost = fit_blocks({1: 2.5, 3: 3.5, 9: 6.5})
    assert (cost.work, cost.per_block) == pytest.approx((2.0, 0.5))
    assert cost.seconds(5) == pytest.approx(4.5)
    assert fit_blocks({1: 3.0, 8: 2.0}).per_block == 0.0
    with pytest.raises(ValueError, match="two numbers"):
        fit_blocks({4: 1.0})


def test_the_fastest_of_several_runs_counts() -> None:
    """Another program that gets in the way only adds time."""
    now, delays = 0.0, itertools.cycle([7.0, 0.0, 0.0])

    def run(blocks: int) -> None:
        nonlocal now
        now += 1.0 + 0.25 * blocks + next(delays)

    cost = measure_blocks(run, (1, 4), clock=lambda: now, repeats=4)
    assert (cost.work, cost.per_block) == pytest.approx((1.0, 0.25))
