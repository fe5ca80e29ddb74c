"""No draw is lost or repeated, in whatever order draws are consumed and over however many ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fastfold.data.loading.loader import ConsumedDraws, merge_draws
from fastfold.errors import ConfigError


def test_what_is_left_is_what_was_not_consumed() -> None:
    draws = ConsumedDraws(1, 3)
    for number in (7, 1, 13):
        draws.add(number)
    assert [number in draws for number in (1, 4, 7, 10, 13, 16)] == [True, False, True, False, True, False]
    assert list(itertools.islice(draws.rest(), 4)) == [4, 10, 16, 19]


def test_a_state_goes_on_where_it_was_taken() -> None:
    draws, again = ConsumedDraws(0, 2), ConsumedDraws(0, 2)
    for number in (4, 0, 10):
        draws.add(number)
    again.load(draws.state())
    assert again.state() == draws.state()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_merged_states_go_on_with_any_number_of_ranks(ranks: int) -> None:
    """What two ranks consumed in some order and what is left for others are all draws, each once."""
    rng = np.random.default_rng(ranks)
    before = [ConsumedDraws(rank, 2) for rank in range(2)]
    consumed = set()
    for rank, draws in enumerate(before):
        for number in rng.permutation(np.arange(rank, 20, 2))[: 4 + 3 * rank]:
            draws.add(int(number))
            consumed.add(int(number))
    merged = merge_draws([draws.state() for draws in before])
    left: set[int] = set()
    for rank in range(ranks):
        after = ConsumedDraws(rank, ranks)
        after.load(merged)
        left |= set(itertools.takewhile(lambda number: number < 40, after.rest()))
    assert left.isdisjoint(consumed)
    assert left | consumed == set(range(40))


def test_a_state_of_another_rank_is_refused() -> None:
    state = ConsumedDraws(0, 2).state()
    with pytest.raises(ConfigError, match="rank 0 of 2 cannot continue as rank 1 of 2"):
        ConsumedDraws(1, 2).load(state)
    with pytest.raises(ConfigError, match="expected the states of all ranks of one run"):
        merge_draws([state, state])
