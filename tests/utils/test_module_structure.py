"""Modules are told apart by their parts, parameters and buffers, and the difference is named."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastfold.errors import ConfigError
from fastfold.memory import Gemini
from fastfold.parallel import parallelize
from fastfold.utils.module_structure import (
    check_memory,
    check_shapes,
    detached_copy,
    differences,
    digest,
    module_structure,
    tensors_in,
    tie,
    tied_names,
    without_data,
)


def test_everything_but_values_counts() -> None:
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    assert digest(module_structure(first)) == digest(module_structure(second))
    second.bias.requires_grad_(False)
    second.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
    own, other = module_structure(first), module_structure(second)
    assert digest(own) != digest(other)
    assert differences(own, other, 0, 3) == (
        "bias is [3] torch.float32 on rank 0 and [3] torch.float32 frozen on rank 3; "
        "mask is absent on rank 0 and buffer [4] torch.bool on rank 3"
    )


def test_an_order_is_a_difference() -> None:
    own, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert digest(own) != digest(other)
    assert differences(own, other, 0, 1) == "they are in another order"


class _Output:
    def __init__(self) -> None:
        self.hidden, self.name = [torch.ones(1)], "output"


def test_tensors_are_found_in_attributes_too() -> None:
    first = torch.zeros(2)
    assert [x.shape for x in tensors_in(({"a": first}, _Output(), nn.Linear(1, 1)))] == [(2,), (1,)]


def test_copies_of_what_has_a_history_have_none() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    (copied,) = detached_copy([x])
    assert copied.grad_fn is None
    assert torch.equal(copied, x)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.table.weight


def test_tied_parameters_are_named_and_tied_again() -> None:
    model = _Tied()
    tied = tied_names(model)
    assert tied == [["table.weight", "head.weight"]]
    copied = without_data(model)
    assert tied_names(copied) == tied
    assert {p.device.type for p in copied.parameters()} == {"meta"}
    model.head.weight = nn.Parameter(torch.zeros(3, 2))
    tie(model, [*tied, ["gone.weight", "table.weight"]])
    assert model.head.weight is model.table.weight
    assert bool(model.head.weight.any())


class _Shared(nn.Module):
    def __init__(self, axis: int, start: int, *, clone: bool = False, buffer: bool = False) -> None:
        super().__init__()
        whole = torch.randn(6, 4)
        first, second = whole.narrow(axis, 0, 2), whole.narrow(axis, start, 2)
        self.first = nn.Parameter(first)
        if buffer:
            self.register_buffer("second", second)
        else:
            self.second = nn.Parameter(second.clone() if clone else second)


@pytest.mark.parametrize("axis", [0, 1])
def test_parameters_in_the_same_memory_are_refused(axis: int) -> None:
    for start in (
        check_memory,
        partial(parallelize, plan={"zero": 1}),
        partial(Gemini, budget=1000, device="cpu"),
    ):
        for shared in (_Shared(axis, 1), _Shared(axis, 0), _Shared(axis, 1, buffer=True)):
            with pytest.raises(ConfigError, match=r"(first and second|second and first) share memory"):
                start(shared)
        for apart in (_Shared(axis, 2), _Shared(axis, 1, clone=True)):
            start(apart)


def test_tensors_without_memory_share_none() -> None:
    with FakeTensorMode():
        fake = nn.BatchNorm1d(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_memory(fake)
        check_memory(nn.BatchNorm1d(3, device="meta"))


def test_lazy_layers_are_refused_until_they_have_a_shape() -> None:
    for start in (
        check_shapes,
        partial(parallelize, plan={"dp": 1}),
        partial(Gemini, budget=1000, device="cpu"),
    ):
        model = nn.Sequential(nn.LazyLinear(2))
        with pytest.raises(
            ConfigError, match=r"0\.weight has no shape yet, because its layer is lazy: run the"
        ):
            start(model)
        model(torch.ones(1, 3))
        start(model)
