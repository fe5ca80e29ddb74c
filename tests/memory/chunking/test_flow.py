"""Each rule cuts what it says, and what it cuts is equal to the whole: parts put together are the operator's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.memory.chunking import flow_rules
from fastfold.memory.chunking.flow import Cut, find_cut
from fastfold.memory.chunking.graph import Graph, export_graph
from fastfold.memory.chunking.program import Program
from fastfold.memory.chunking.steps import Loop

_A = torch.randn(3, 4, 5, 6, dtype=torch.float64)
_M, _P = _A[0, 0], _A[0]
_W = torch.randn(7, 6, dtype=torch.float64)
_INDEX = torch.randint(0, 3, (3, 4))
_IMAGE = torch.randn(3, 4, 6, 8, dtype=torch.float64)
_KERNEL = torch.randn(5, 4, 3, 3, dtype=torch.float64)
_BIAS = torch.randn(5, dtype=torch.float64)
_Q, _K, _V = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 6, 6))


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Tensor) -> Any:
        return self._function(*args)


def graph_of(function: Callable[..., Any], *args: Any) -> Graph:
    """The graph of a function."""
    return export_graph(_Function(function), args, {}, {})


# A function, its arguments, and the dimensions along which the last operation of the function can be cut.
_CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], set[int]]] = {
    "add": (lambda a, b: a + b, (_A, _A[:, :1, :, 0:1]), {0, 1, 2, 3}),
    "where": (lambda a: torch.where(a > 0, a, 1.0), (_A,), {0, 1, 2, 3}),
    "masked_fill": (lambda a, m: a.masked_fill(m > 0, 1.0), (_A, _M), {0, 1, 2, 3}),
    "clone": (lambda a: a.clone(), (_A,), {0, 1, 2, 3}),
    "to": (lambda a: a.to(torch.float32), (_A,), {0, 1, 2, 3}),
    "zeros_like": (torch.zeros_like, (_A,), {0, 1, 2, 3}),
    "softmax": (lambda a: a.softmax(-2), (_A,), {0, 1, 3}),
    "cumsum": (lambda a: a.cumsum(1), (_A,), {0, 2, 3}),
    "layer_norm": (lambda a: F.layer_norm(a, (5, 6)), (_A,), {0, 1}),
    "rms_norm": (lambda a: F.rms_norm(a, (6,)), (_A,), {0, 1, 2}),
    "group_norm": (lambda a: F.group_norm(a, 2), (_A,), {0}),
    "batch_norm": (lambda a: F.batch_norm(a, a[0, :, 0, 0], a[0, :, 0, 0] ** 2), (_A,), {0, 2, 3}),
    "sum": (lambda a: a.sum((1, -1)), (_A,), {0, 1}),
    "sum with keepdim": (lambda a: a.sum(1, keepdim=True), (_A,), {0, 2, 3}),
    "amax": (lambda a: a.amax(0), (_A,), {0, 1, 2}),
    "max": (lambda a: a.max(1)[0], (_A,), {0, 1, 2}),
    "embedding": (F.embedding, (_INDEX, _W), {0, 1, 2}),
    "index_select": (lambda a, i: a.index_select(1, i[0]), (_A, _INDEX), {0, 1, 2, 3}),
    "gather": (lambda a, i: a.gather(0, i), (_M[:, :4], _INDEX), {0, 1}),
    "gather of the first": (lambda a, i: a.gather(0, i), (_M, _INDEX), {0}),
    "one_hot": (lambda i: F.one_hot(i, 4), (_INDEX,), {0, 1}),
    "tril": (torch.tril, (_A,), {0, 1}),
    "flip": (lambda a: a.flip(1, 2), (_A,), {0, 3}),
    "roll": (lambda a: a.roll(1, 2), (_A,), {0, 1, 3}),
    "conv2d": (lambda a, w, b: F.conv2d(a, w, b), (_IMAGE, _KERNEL, _BIAS), {0, 1}),
    "linear": (F.linear, (_A, _W, _W[:, 0]), {0, 1, 2, 3}),
    "matmul": (lambda a, b: a @ b, (_A, _P.transpose(-1, -2)), {0, 1, 2, 3}),
    "bmm": (lambda a: torch.bmm(a, a.transpose(1, 2)), (_P,), {0, 1, 2}),
    "mm": (lambda a, b: torch.mm(a, b.t()), (_M, _W), {0, 1}),
    "addmm": (lambda a, b: torch.addmm(b[:, 0], a, b.t()), (_M, _W), {0, 1}),
    "baddbmm": (lambda a: torch.baddbmm(a[:, :, :1], a, a.transpose(1, 2)), (_P,), {0, 1, 2}),
    "einsum": (lambda a, b: torch.einsum("...ij,kj->...ki", a, b), (_A, _W), {0, 1, 2, 3}),
    "attention": (F.scaled_dot_product_attention, (_Q, _K, _V), {0, 1, 2}),
    "attention with mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (_Q, _K, _V, torch.randn(2, 1, 5, 6, dtype=torch.float64)),
        {0, 1, 2},
    ),
    "causal attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        (_Q,),
        {0, 1},
    ),
    "reshape": (lambda a: a.reshape(3, 20, 3, 2), (_A,), {0}),
    "reshape that joins": (lambda a: a.reshape(12, 5, 6), (_A,), {1, 2}),
    "permute": (lambda a: a.permute(2, 0, 3, 1), (_A,), {0, 1, 2, 3}),
    "transpose": (lambda a: a.transpose(-1, 0), (_A,), {0, 1, 2, 3}),
    "t": (lambda a: a.t(), (_M,), {0, 1}),
    "movedim": (lambda a: a.movedim(-1, 1), (_A,), {0, 1, 2, 3}),
    "expand": (lambda a: a[:, :1].expand(3, 4, 5, 6), (_A,), {0, 1, 2, 3}),
    "expand_as": (lambda a, m: m.expand_as(a), (_A, _M), {0, 1, 2, 3}),
    "unsqueeze": (lambda a: a.unsqueeze(2), (_A,), {0, 1, 3, 4}),
    "squeeze": (lambda a: a.squeeze(1), (_A[:, :1],), {0, 1, 2}),
    "squeeze of all": (lambda a: a.squeeze(), (_A[:, :1],), {0, 1, 2}),
    "squeeze of a longer dimension": (lambda a: a.squeeze(2), (_A,), {0, 1, 2, 3}),
    "squeeze of a number": (lambda a: a + a.sum().squeeze(0), (_A,), {0, 1, 2, 3}),
    "squeeze of some": (lambda a: a.squeeze((0, -1)), (_A[..., :1],), {0, 1, 2}),
    "cat": (lambda a: torch.cat([a, a], 1), (_A,), {0, 2, 3}),
    "stack": (lambda a: torch.stack([a, a], 1), (_A,), {0, 2, 3, 4}),
    "slice": (lambda a: a[:, 1:3], (_A,), {0, 2, 3}),
    "select": (lambda a: a[:, 1], (_A,), {0, 1, 2}),
    "split": (lambda a: a.split([1, 3], 1)[1], (_A,), {0, 2, 3}),
    "unbind": (lambda a: a.unbind(2)[1], (_A,), {0, 1, 2}),
    "pad": (lambda a: F.pad(a, (1, 2)), (_A,), {0, 1, 2}),
    "ones": (lambda a: torch.ones(3, 4), (_A,), {0, 1}),
    "unfold": (lambda a: a.unfold(1, 2, 1), (_A,), set()),
    "sort": (lambda a: a.sort(1)[0], (_A,), set()),
}


def cut_last(graph: Graph, dim: int, chunks: int) -> list[int | Loop] | None:
    """The last operation in chunks, with the one before it where it takes one of several results."""
    whole: list[int | Loop] = [operation.index for operation in graph.operations]
    count = 2 if graph.operations[-1].name == "getitem" else 1
    members = tuple(operation.index for operation in graph.operations[-count:])
    cuts: dict[int, Cut] = {}
    for member in members:
        cut = find_cut(graph, graph.operation(member), dim)
        if cut is None:
            return None
        cuts[member] = cut
    read: dict[int, set[int | None]] = {}
    for path, index in graph.operation(members[0]).values():
        read.setdefault(index, set()).add(cuts[members[0]].dims.get(path))
    loop = Loop(
        members=members,
        dims=dict.fromkeys(members, dim),
        cuts=cuts,
        outputs=members[-1:],
        length=graph.layout(members[-1]).shape[dim],
        read={index: frozenset(dims) for index, dims in read.items()},
        chunks=chunks,
    )
    return [*whole[:-count], loop]


@pytest.mark.long
@pytest.mark.parametrize("name", _CASES)
def test_parts_make_up_the_whole(name: str) -> None:
    function, args, expected = _CASES[name]
    graph = graph_of(function, *args)
    result = function(*args)
    found = set()
    for dim in range(result.dim()):
        length = result.shape[dim]
        for chunks in {2, length} if length > 1 else ():
            steps = cut_last(graph, dim, chunks)
            if steps is None:
                continue
            found.add(dim)
            torch.testing.assert_close(
                Program(graph, steps).run(args)[0], result, rtol=1e-12, atol=1e-12, equal_nan=True
            )
    assert found == expected


def test_rules_are_registered_once_for_each_operator() -> None:
    with pytest.raises(AssertionError, match="linear"):
        flow_rules.rule("linear")(flow_rules.rule)  # type: ignore[arg-type]


def test_a_diagonal_and_an_equation_without_a_result_are_not_cut() -> None:
    square = torch.randn(4, 4, 5)
    graph = graph_of(lambda a: torch.einsum("iij->ij", a), square)
    assert find_cut(graph, graph.operations[-1], 0) is None
    graph = graph_of(lambda a: torch.einsum("ij,jk", a, a.t()), torch.randn(4, 5))
    assert find_cut(graph, graph.operations[-1], 0) is None
