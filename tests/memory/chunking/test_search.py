"""The search takes the region that costs least of those that fit, and says so where none does."""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.memory.chunking.search import Search, cuts_of, dissolved, flow_back, make_loop
from fastfold.memory.chunking.steps import Loop, measure_memory
from tests.memory.chunking.test_flow import graph_of

_X = torch.randn(16, 32, dtype=torch.float64)
_BYTES = 4096


def _wide(x: Tensor) -> Tensor:
    return (x.repeat_interleave(1, 0).unsqueeze(-1) * x.unsqueeze(-2)).sin().sum(-1)


def test_a_flow_stops_where_a_value_is_needed_as_a_whole() -> None:
    graph = graph_of(lambda x: x.exp() @ x.sin().t(), _X)
    names = {operation.index: operation.name for operation in graph.operations}
    whole = list(names)
    flow = flow_back(graph, cuts_of(graph), whole, whole[-1], 0)
    assert flow is not None
    assert sorted(names[value] for value in flow.dims) == ["aten::exp", "aten::matmul"]
    before, transposed, loop = make_loop(graph, whole, flow, graph.output_indices())
    assert isinstance(loop, Loop)
    assert isinstance(before, int)
    assert names[before] == "aten::sin"
    assert dissolved([before, transposed, loop]) == [before, transposed, *loop.members]


def test_the_fewest_chunks_that_fit_are_taken() -> None:
    graph = graph_of(lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).sin().sum(-1), _X)
    search = Search(measure_memory(graph), donate=False)
    whole = search.unchunked().profile.peak
    assert whole == _BYTES + 2 * 32 * _BYTES
    for target in (whole // 2, whole // 4):
        chosen = search.choose(target)
        (loop,) = (step for step in chosen.profile.steps if isinstance(step, Loop))
        assert chosen.fits
        fewer = Loop(
            loop.members, loop.dims, loop.cuts, loop.outputs, loop.length, loop.read, loop.chunks - 1
        )
        steps = [fewer if step is loop else step for step in chosen.profile.steps]
        assert search.fewest_chunks(steps, target).profile.peak <= target
        assert loop.chunks == -(-loop.length // (loop.length // -(-whole // target) or 1)) or loop.chunks > 1


def test_what_cannot_be_cut_stays_whole() -> None:
    graph = graph_of(lambda x: x.flatten().sort()[0].cumsum(0), _X)
    chosen = Search(measure_memory(graph), donate=False).choose(1)
    assert not chosen.fits
    assert all(isinstance(step, int) for step in chosen.profile.steps)
