"""A table that is cut over ranks with other rows of the batch is gathered for each look-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastfold.parallel.comm.groups import Group
from fastfold.parallel.tensor_parallel import ParallelEmbedding
from tests.helpers.thread_ranks import on_a_grid

IDS = torch.tensor([[0, 4, 2], [3, 3, 1]])


def test_ranks_with_other_rows_look_up_the_whole_table_and_sum_its_gradient() -> None:
    table = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = table.clone().requires_grad_()
    nn.functional.embedding(IDS, whole).square().sum().backward()
    assert whole.grad is not None
    expected = whole.grad

    def run(group: Group) -> float:
        layer: Any = object.__new__(ParallelEmbedding)
        nn.Module.__init__(layer)
        layer.masked, layer.padding_idx = False, None
        layer.layout, layer.vocabulary_group, layer.sizes = SimpleNamespace(rows=[group]), group, [3, 2]
        own = group.shard(5)
        layer.weight = nn.Parameter(table[own].clone())
        rows = layer(IDS[group.rank : group.rank + 1])
        rows.square().sum().backward()
        assert torch.equal(rows, table[IDS[group.rank : group.rank + 1]])
        return float((layer.weight.grad - expected[own]).abs().max())

    assert max(on_a_grid((2,), run)) < 1e-12
