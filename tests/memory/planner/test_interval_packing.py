"""Which chunks stay between two uses: intervals by definition, and packings against all subsets."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.memory.planner.interval_packing import (
    IntervalPacking,
    ResidencyInterval,
    residency_intervals,
)


def test_intervals_lie_between_uses_and_around_the_end() -> None:
    uses, sizes = [{0}, {1}, {0, 1}, {2}], {0: 10, 1: 20, 2: 30}
    assert residency_intervals(uses, sizes, 1, ()) == [
        ResidencyInterval(0, 1, 1, 10),
        ResidencyInterval(0, 3, 1, 10),
        ResidencyInterval(1, 2, 0, 20),  # used twice in a row
        ResidencyInterval(1, 3, 2, 20),
        ResidencyInterval(2, 4, 3, 30),
    ]
    assert residency_intervals(uses, sizes, 1, {0, 2}) == [
        ResidencyInterval(0, 1, 1, 10),
        ResidencyInterval(1, 2, 0, 20),
        ResidencyInterval(1, 3, 2, 20),
    ]
    twice = residency_intervals(uses, sizes, 2, {0, 1, 2})
    assert twice == [
        ResidencyInterval(0, 1, 1, 10),
        ResidencyInterval(0, 5, 1, 10),
        ResidencyInterval(1, 2, 0, 20),
        ResidencyInterval(1, 6, 0, 20),
    ]


def _covered(interval: ResidencyInterval, period: int) -> set[int]:
    return {(interval.start + i) % period for i in range(interval.length)}


def _fits(room: list[int], intervals: list[ResidencyInterval], chosen: tuple[int, ...]) -> bool:
    left = list(room)
    for index in chosen:
        for place in _covered(intervals[index], len(room)):
            left[place] -= intervals[index].size
    return min(left) >= 0


@st.composite
def _problems(draw: st.DrawFn, most: int = 20) -> tuple[list[int], list[ResidencyInterval]]:
    period = draw(st.integers(1, 6))
    room = draw(st.lists(st.integers(0, 12), min_size=period, max_size=period))
    count = draw(st.integers(0, 7))
    return room, [
        ResidencyInterval(
            i, draw(st.integers(0, period)), draw(st.integers(0, period)), draw(st.integers(1, most))
        )
        for i in range(count)
    ]


@given(_problems(6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_packings_fit_and_save_nearly_as_much_as_any(
    problem: tuple[list[int], list[ResidencyInterval]],
) -> None:
    """Of seven intervals or fewer all subsets are tried; exchanges of up to three come within a tenth of the best."""
    room, intervals = problem
    packing = IntervalPacking(room, intervals, ())
    packing.improve()
    chosen = tuple(sorted(packing.kept))
    assert _fits(room, intervals, chosen)
    assert packing.saved == sum(intervals[i].size for i in chosen)
    stay = [
        {intervals[i].chunk for i in chosen if place in _covered(intervals[i], len(room))}
        for place in range(len(room))
    ]
    assert packing.resident() == stay
    best = max(
        sum(intervals[i].size for i in subset)
        for count in range(len(intervals) + 1)
        for subset in combinations(range(len(intervals)), count)
        if _fits(room, intervals, subset)
    )
    assert 0.9 * best <= packing.saved <= best


@given(_problems())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_filling_keeps_what_fits_in_the_order_given(
    problem: tuple[list[int], list[ResidencyInterval]],
) -> None:
    room, intervals = problem
    packing = IntervalPacking(room, intervals, ())
    order = list(reversed(range(len(intervals))))
    expected: tuple[int, ...] = ()
    for index in order:
        if _fits(room, intervals, (*expected, index)):
            expected = (*expected, index)
    assert packing.fill(order) == list(expected)
    assert packing.fill(order) == []  # once is enough


def test_exchanges_find_what_farthest_next_use_does_not() -> None:
    """The short interval comes first and leaves no room for the long one, which is worth three times as much."""
    intervals = [ResidencyInterval(0, 0, 1, 2), ResidencyInterval(1, 0, 2, 6)]
    packing = IntervalPacking([6, 6], intervals, ())
    assert packing.fill([0, 1]) == [0]
    packing.improve()
    assert packing.kept == {1}
    # And one dear interval goes for two cheaper ones that are worth more together.
    intervals = [ResidencyInterval(0, 0, 2, 5), ResidencyInterval(1, 0, 1, 4), ResidencyInterval(2, 1, 1, 4)]
    packing = IntervalPacking([6, 6], intervals, (0,))
    packing.improve()
    assert packing.kept == {1, 2}


def test_equal_problems_have_equal_packings() -> None:
    intervals = [ResidencyInterval(i, i % 5, 1 + i % 3, 1 + (7 * i) % 11) for i in range(30)]
    found = []
    for _ in range(2):
        packing = IntervalPacking([20, 14, 9, 17, 11], intervals, ())
        packing.improve()
        found.append(packing.kept)
    assert found[0] == found[1]
