"""Parts of a list of targets for job arrays: each target in one part, whatever the order of the list."""

from __future__ import annotations

import random

import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError
from fastfold.inference.workers.options import Shard, parse_shard

TARGETS = [target_from_sequence("ACDEFGHIKL"[: 1 + k % 10] * (1 + k % 7), f"t{k}") for k in range(101)]
COSTS = [float(target.num_residues) ** 2 for target in TARGETS]


@pytest.mark.parametrize("count", [1, 2, 7, 101, 150])
def test_every_target_is_in_one_part(count: int):
    parts = [Shard(k, count).of(TARGETS, COSTS) for k in range(1, count + 1)]
    assert sorted(i for part in parts for i in part) == list(range(len(TARGETS)))


def test_parts_cost_about_the_same():
    costs = [sum(COSTS[i] for i in Shard(k, 5).of(TARGETS, COSTS)) for k in range(1, 6)]
    assert max(costs) - min(costs) <= max(COSTS)


def test_parts_do_not_depend_on_the_order_of_the_input():
    order = random.Random(0).sample(range(len(TARGETS)), len(TARGETS))
    for k in (1, 2, 3):
        plain = {TARGETS[i].name for i in Shard(k, 3).of(TARGETS, COSTS)}
        mixed = Shard(k, 3).of([TARGETS[i] for i in order], [COSTS[i] for i in order])
        assert {TARGETS[order[i]].name for i in mixed} == plain


def test_a_part_is_written_as_one_of_many():
    assert parse_shard("3/20") == Shard(3, 20)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_what_is_no_part_is_refused(text: str):
    with pytest.raises(ConfigError, match="from 1 to N"):
        parse_shard(text)
