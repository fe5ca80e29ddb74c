"""The mutation tool tells a reduction that nothing checks from one that is checked."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastfold.parallel.comm.collectives import all_reduce, reduce_scatter
from fastfold.parallel.comm.groups import Group
from tests.helpers.drop_reductions import undetected_reductions
from tests.helpers.spawn_ranks import launch


def _one_is_not_looked_at() -> tuple[int, list[str]]:
    group = Group(dist.group.WORLD, "everyone")

    def difference() -> float:
        all_reduce(torch.ones(3), group)
        found = reduce_scatter(torch.ones(4), 0, group)
        return (found - 2).abs().max().item()

    return undetected_reductions(difference)


def test_a_reduction_that_nothing_checks_is_named() -> None:
    assert launch(_one_is_not_looked_at, 2) == [(2, ["0: start_all_reduce over everyone"])] * 2
