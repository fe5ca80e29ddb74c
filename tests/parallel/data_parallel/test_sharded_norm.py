"""Norms of whole parameters of which ranks hold parts: what is cut adds up, what ranks hold alike counts once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.sharded_norm import ShardNorms, local, whole
from tests.helpers.thread_ranks import on_a_grid, on_one_line

WHOLE = {
    name: torch.randn(4, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
    for i, name in enumerate(("both", "rows", "columns", "alike"))
}


def test_each_parameter_is_added_up_over_the_groups_that_cut_it() -> None:
    def run(rows: Group, columns: Group) -> Tensor:
        cut = {"both": (rows, columns), "rows": (rows,), "columns": (columns, Group(None))}
        norms = ShardNorms(cut)  # what is in no group is held alike
        own = {}
        for name, x in WHOLE.items():
            first = rows.shard(4) if name in ("both", "rows") else slice(None)
            second = columns.shard(6) if name in ("both", "columns") else slice(None)
            own[name] = x[first, second]
        return norms.squares(own)

    expected = torch.stack([x.square().sum() for x in WHOLE.values()])
    for found in on_a_grid((2, 3), run):
        torch.testing.assert_close(found, expected)


def test_a_total_adds_the_stages_of_a_pipeline() -> None:
    """Each stage has other parameters, and leaves out those that got no gradient."""

    def run(stage: Group) -> tuple[float, float]:
        norms = ShardNorms({}, stage)
        own = {"a": torch.full((3,), 1.0 + stage.rank), "b": None}
        return norms.total(own).item(), norms.total({"b": None}).item()

    for found, nothing in on_one_line(2, run):
        assert found == pytest.approx(15.0, rel=1e-6)
        assert nothing == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_large_squares_do_not_overflow(dtype: torch.dtype) -> None:
    """Of sixteen norms of 2^63, whose squares float32 would hold one by one, and not their sum."""
    tensors = {str(i): torch.full((4,), 2.0**62, dtype=dtype) for i in range(16)}
    found = ShardNorms({}).total(tensors)
    assert (found.dtype, found.item()) == (torch.float64, 2.0**130)
    assert ShardNorms({}).squares({}).shape == (0,)


def test_plain_tensors_are_their_own_parts() -> None:
    x = torch.ones(2)
    assert local(x) is x
    assert whole(x) is x
