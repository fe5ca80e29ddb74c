"""Sampling weights and the order of draws."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.training.entry import Entry
from fastfold.data.training.sampling import WeightedOrder, sampling_weights
from fastfold.errors import ConfigError

NOWHERE = Path("nowhere.pdb")


def counts(order: WeightedOrder, number: int) -> np.ndarray:
    return np.bincount([order.index(i) for i in range(number)], minlength=len(order.probabilities))


def test_weights_are_those_of_the_supplement() -> None:
    """1/512 max(min(N, 512), 256), over the cluster's size, times the entry's factor."""
    entries = [
        Entry("short", NOWHERE, "A" * 40),
        Entry("middle", NOWHERE, "A" * 300),
        Entry("long", NOWHERE, "A" * 900),
        Entry("crowded", NOWHERE, "A" * 384, cluster_size=3),
        Entry("favoured", NOWHERE, "A" * 512, weight=5.0),
    ]
    np.testing.assert_allclose(sampling_weights(entries), [0.5, 300 / 512, 1, 0.25, 5], rtol=1e-15)


def test_order_is_a_function_of_seed_and_number() -> None:
    """Any process finds any draw without those before it, and a copy in another process agrees."""
    weights = np.array([1.0, 2.0, 0.5, 4.0])
    order = WeightedOrder([("abcd", weights, 1.0)], 3)
    expected = [order(i) for i in range(40)]
    copy = pickle.loads(pickle.dumps(order))
    assert [copy(i) for i in reversed(range(40))] == expected[::-1]
    for i in (0, 7, 39):
        assert WeightedOrder([("abcd", weights, 1.0)], 3)(i) == expected[i]
    other = WeightedOrder([("abcd", weights, 1.0)], 4)
    assert [other(i) for i in range(40)] != expected


def test_even_rounds_hold_each_entry_as_often_as_its_share() -> None:
    """In each round an entry comes its expected number of times, rounded up or down."""
    weights = np.random.default_rng(0).random(50) + 0.1
    order = WeightedOrder([(range(50), weights, 1.0)], 1)
    for turn in range(4):
        found = np.bincount([order.index(50 * turn + i) for i in range(50)], minlength=50)
        assert (np.abs(found - 50 * order.probabilities) < 1).all()
    uniform = WeightedOrder([(range(50), np.ones(50), 1.0)], 1)
    first, second = ([uniform(i + start) for i in range(50)] for start in (0, 50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_draws_follow_the_probabilities() -> None:
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    found = counts(WeightedOrder([(range(4), weights, 1.0)], 0), 2000)
    assert found[1] == 0
    np.testing.assert_allclose(found / 2000, weights / 8, atol=0.04)


def test_second_set_is_mixed_in_by_its_share() -> None:
    """Shares hold between sets, whatever the sums of their weights; a share of zero takes nothing."""
    sets = [(["a", "b"], np.array([1.0, 3.0]), 0.25), (["x"], np.array([1e-3]), 0.75)]
    order = WeightedOrder(sets, 0)
    np.testing.assert_allclose(order.probabilities, [0.0625, 0.1875, 0.75])
    drawn = [order(i) for i in range(600)]
    assert abs(drawn.count("x") - 450) < 30
    alone = WeightedOrder([(["a"], np.ones(1), 1.0), (["x", "y"], np.ones(2), 0.0)], 0)
    assert {alone(i) for i in range(50)} == {"a"}


def test_orders_that_cannot_be_drawn_are_refused() -> None:
    for sets, message in [
        ([([], np.zeros(0), 1.0)], "empty"),
        ([(["a"], np.zeros(1), 1.0)], "zero"),
        ([(["a"], np.array([np.nan]), 1.0)], "finite"),
        ([(["a"], np.array([1.0]), 0.0)], "all shares are zero"),
        ([(["a"], np.ones(2), 1.0)], "shape"),
    ]:
        with pytest.raises(ConfigError, match=message):
            WeightedOrder(sets, 0)
    with pytest.raises(ConfigError, match="negative"):
        WeightedOrder([(["a"], np.ones(1), 1.0)], -1)
