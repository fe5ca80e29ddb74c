"""Operators of a call: their kinds, constant random numbers, and the first one that makes two runs differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastfold.parallel.checks.operators import (
    OperatorLog,
    OutputLog,
    RepeatableCall,
    is_pointwise,
    kind_name,
)


def kinds(log: OperatorLog) -> list[str]:
    return sorted(kind_name(kind) for kind in log.kinds)


def test_a_kind_has_dimensions_and_flags_but_no_sizes_and_fractions() -> None:
    x = torch.ones(2, 3)
    with OperatorLog() as log:
        (x + 1.5).sum(0)
        before = set(log.kinds)
        (torch.ones(5, 3) + 2.5).sum(0)
        assert log.kinds - before == {kind for kind in log.kinds if "ones" in str(kind)}
        x.sum(1)
    assert kinds(log).count("aten.sum.dim_IntList") == 2
    assert is_pointwise(torch.ops.aten.add.Tensor)
    assert not is_pointwise(torch.ops.aten.sum.dim_IntList)
    with OperatorLog() as outer, outer.paused():
        x.sum(0)
    assert kinds(outer) == []


def test_random_numbers_are_constant_inside_a_repeatable_call() -> None:
    x = torch.arange(6.0)
    with RepeatableCall():
        assert torch.rand(3).tolist() == [0.5] * 3
        assert nn.functional.dropout(x, 0.5).equal(x)


class Model(nn.Module):
    """A layer of single positions, and one that looks along the sequence unless it is told not to."""

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.Identity()
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.norm(x - x.mean(1, keepdim=True) if self.looks else x.relu())


def first_apart(module: nn.Module) -> str | None:
    """Run a module on positions 2 to 4 of 6 and on the whole; return the first difference."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4)
    logs = []
    for positions in (x[:, 2:5].contiguous(), x):
        log = OutputLog(module)
        with torch.no_grad(), log.named(), log:
            module(positions)
        logs.append(log)
    return logs[0].first_apart(logs[1], (2, 3, 6))


def test_the_operator_that_looks_along_the_sequence_is_named() -> None:
    assert first_apart(Model(looks=False)) is None
    assert first_apart(Model(looks=True)) == "aten.mean in Model sees only this rank's part of the sequence"
    inner = nn.Sequential(nn.Identity(), Model(looks=True))
    assert first_apart(inner) == "aten.mean in 1 (Model) sees only this rank's part of the sequence"


def test_kinds_tell_dimensions_and_flags_apart_and_neither_sizes_nor_fractions() -> None:
    """Operators on single elements count by their name; messages of ranks are left out."""
    x, aten = torch.ones(2, 3, 4), torch.ops.aten

    def kinds(*calls: tuple[Any, tuple[Any, ...], dict[str, Any] | None]) -> int:
        log = OperatorLog()
        for func, args, kwargs in calls:
            log.record(func, args, kwargs)
        return len(log.kinds)

    cumsum, total, view = aten.cumsum.default, aten.sum.dim_IntList, aten.view.default
    assert kinds((cumsum, (x, 0), None), (cumsum, (x, 1), None)) == 2
    assert kinds((cumsum, (x, 0), None), (cumsum, (x + 1, 0), {})) == 1
    half = {"dtype": torch.float16}
    assert (
        kinds((cumsum, (x, 0), None), (cumsum, (x, 0), half), (cumsum, (x, 0), {"dtype": torch.float32})) == 3
    )
    assert (
        kinds((total, (x, [0, 1]), None), (total, (x, [0, 2]), None), (total, (x, [0, 1], True), None)) == 3
    )
    assert kinds((view, (x, [6, 4]), None), (view, (x, [24]), None), (view, (x,), {"size": [2, 12]})) == 1
    assert kinds((aten.add.Tensor, (x, x), None), (aten.add.Tensor, (x, x), {"alpha": 2})) == 1
    dropout = aten.native_dropout.default
    assert kinds((dropout, (x, 0.1, True), None), (dropout, (x, 0.2, True), None)) == 1
    assert kinds((dropout, (x, 0.1, True), None), (dropout, (x, 0.1, False), None)) == 2
    assert kinds((aten.detach.default, (x,), None)) == 0
