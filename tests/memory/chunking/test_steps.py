"""What a profile counts is what a simulated device measures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold.memory.chunking.api import _measured_peak
from fastfold.memory.chunking.graph import Graph
from fastfold.memory.chunking.program import Program
from fastfold.memory.chunking.search import cuts_of, flow_back, make_loop
from fastfold.memory.chunking.steps import (
    Loop,
    computed_values,
    inner_bytes,
    measure_memory,
    profile,
    used_values,
)
from tests.memory.chunking.test_flow import graph_of

_X = torch.randn(8, 16, dtype=torch.float64)
_BYTES = 1024


def _chain(x: Tensor) -> Tensor:
    return ((x.exp() + 1).reshape(4, 2, 16).sin() * 2).reshape(8, 16)


def _looped(graph: Graph, chunks: int, donate: bool) -> tuple[Loop, int, int]:
    """All of a graph as a loop along its first dimension, with its counted and measured peak."""
    whole = [operation.index for operation in graph.operations]
    flow = flow_back(graph, cuts_of(graph), whole, whole[-1], 0)
    assert flow is not None
    (loop,) = make_loop(graph, whole, flow, graph.output_indices())
    assert isinstance(loop, Loop)
    loop = Loop(loop.members, loop.dims, loop.cuts, loop.outputs, loop.length, loop.read, chunks)
    found = profile(measure_memory(graph), [loop], donate=donate)
    (step,) = found.steps
    assert isinstance(step, Loop)
    return step, found.peak, _measured_peak(graph, found.steps)


def test_views_take_nothing_and_the_rest_is_freed_when_it_is_not_needed() -> None:
    graph = graph_of(_chain, _X)
    memory = measure_memory(graph)
    assert [memory.alias[o.index] for o in graph.operations] == [None, None, 2, None, None, 5]
    whole = [operation.index for operation in graph.operations]
    found = profile(memory, whole, donate=False)
    assert found.peak == 3 * _BYTES == _measured_peak(graph, tuple(whole))
    assert used_values(graph, whole[1]) == (whole[0],)
    assert computed_values(whole[1]) == (whole[1],)


@pytest.mark.parametrize(("donate", "copies"), [(False, 2), (True, 1)])
def test_a_loop_takes_its_results_and_a_chunk(donate: bool, copies: int) -> None:
    graph = graph_of(lambda x: x.exp().sin() + 1, _X)
    step, counted, measured = _looped(graph, 4, donate)
    memory = measure_memory(graph)
    assert inner_bytes(memory, step) == 2 * _BYTES
    assert counted == measured == copies * _BYTES + 2 * _BYTES // 4
    assert bool(step.reuse) == donate


def test_memory_is_not_reused_where_a_value_is_read_in_another_way_or_later() -> None:
    """The whole of x goes into every chunk, so that the first chunk must not overwrite it."""
    graph = graph_of(lambda x: x.exp() @ x.t() @ x, _X)
    whole = [operation.index for operation in graph.operations]
    flow = flow_back(graph, cuts_of(graph), whole, whole[-1], 0)
    assert flow is not None
    steps = make_loop(graph, whole, flow, graph.output_indices())
    found = profile(measure_memory(graph), steps, donate=True)
    assert all(not step.reuse for step in found.steps if isinstance(step, Loop))
    x = _X.clone()
    torch.testing.assert_close(Program(graph, found.steps).run([x])[0], _X.exp() @ _X.t() @ _X)
    assert torch.equal(x, _X)
