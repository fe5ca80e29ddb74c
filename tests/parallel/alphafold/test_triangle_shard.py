"""Both halves of a triangle multiplication on any part of the pair, around a contraction that is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.kernels.common.layout import padded_width
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from fastfold.memory import HostBuffers
from fastfold.parallel.alphafold.axial_layers import AxialTriangleMultiplication
from fastfold.parallel.alphafold.convert import convert_modules
from fastfold.parallel.alphafold.regather import begins_backward
from fastfold.parallel.alphafold.triangle_shard import ShardedTriangleMultiplication, SummedTerms
from fastfold.parallel.axial import matmul
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.groups import Group
from fastfold.utils.module_structure import move_into
from tests.helpers.definitions import close
from tests.helpers.thread_ranks import on_one_line
from tests.parallel.alphafold.axial_cases import C_Z, CASES, RESIDUES, inputs_of, plain_module


def _layer(name: str) -> ShardedTriangleMultiplication:
    return move_into(ShardedTriangleMultiplication, plain_module(CASES[name]).eval())


@pytest.mark.parametrize("name", ["outgoing", "incoming"])
@pytest.mark.parametrize("channels", [None, 3])
def test_halves_around_a_whole_contraction_are_the_plain_layer(name: str, channels: int | None) -> None:
    """Without gradients some channels at a time, and never fewer than there are ranks."""
    layer = _layer(name)
    layer.policy = replace(ExecutionPolicy(), contraction=ContractionPlan(channels=channels))
    pair, mask = inputs_of(CASES[name], (2,))
    seen: list[int] = []

    def contract(left: Tensor, right: Tensor) -> Tensor:
        seen.append(left.shape[-3])
        if layer.outgoing:
            return torch.einsum("...cik,...cjk->...cij", left, right)
        return torch.einsum("...ckj,...cki->...cij", left, right)

    c = len(layer.projection.weight) // 2
    with torch.no_grad():
        expected = plain_module(CASES[name]).eval()(pair, mask)
        close(layer.updated(pair, layer.product(pair, mask, contract, 1), None), expected)
        assert max(seen) == (channels or -(-c // 4))
        assert sum(seen) == c
        seen.clear()
        close(layer.updated(pair, layer.product(pair, mask, contract, c), None), expected)
        assert seen == [c]
    seen.clear()
    product = layer.product(pair.requires_grad_(), mask, contract, 1)
    assert seen == [c]  # with gradients all at once
    close(layer.updated(pair, product, None), expected)


def test_a_part_of_the_pair_gives_that_part_of_the_factors_and_of_the_update() -> None:
    layer = _layer("outgoing")
    pair, mask = inputs_of(CASES["outgoing"], ())
    part = (slice(1, 4), slice(2, 7))
    with torch.no_grad():
        whole = layer.product(pair, mask, lambda left, right: left + 2 * right, 1)
        some = layer.product(pair[part], mask[part], lambda left, right: left + 2 * right, 1)
        close(some, whole[:, 1:4, 2:7])
        dropout = torch.zeros(1, 5, pair.shape[-1], dtype=pair.dtype)
        dropout[:, 1] = 2.0
        plain = layer.updated(pair[part], some, None) - pair[part]
        close(layer.updated(pair[part], some, dropout), pair[part] + dropout * plain)


@pytest.mark.parametrize("name", ["outgoing", "incoming"])
@pytest.mark.parametrize(("kept", "inplace"), [(0.0, True), (0.5, True), (0.4, False), (1.0, True)])
def test_a_product_that_waits_elsewhere_gives_the_same_update(name: str, kept: float, inplace: bool) -> None:
    """Some of its rows here, the others on the host; the last block of rows and of channels are shorter."""
    layer, host = _layer(name), HostBuffers()
    layer.policy = ExecutionPolicy(inplace=inplace, contraction=ContractionPlan(3, host, kept))
    pair, mask = inputs_of(CASES[name], (2,))
    dropout = torch.rand(2, 1, *pair.shape[-2:], dtype=pair.dtype)

    def contract(left: Tensor, right: Tensor) -> Tensor:
        if layer.outgoing:
            return torch.einsum("...cik,...cjk->...cij", left, right)
        return torch.einsum("...ckj,...cki->...cij", left, right)

    with torch.no_grad():
        own = pair.clone()
        expected = layer.updated(pair.clone(), layer.product(pair, mask, contract, 1), dropout)
        found = layer.multiplied(own, mask, contract, 1, dropout)
        close(found, expected)
    assert (found.data_ptr() == own.data_ptr()) == inplace
    n, c = pair.shape[-2], len(layer.projection.weight) // 2
    assert host.sent == host.returned == 2 * int(n * (1.0 - kept)) * n * c * 8


class _Given(nn.Module):
    """Dropout whose factors are known."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-2:] == self.factors.shape[-2:]
        return self.factors


@pytest.mark.parametrize("outgoing", [False, True])
def test_gradients_of_factors_are_those_of_their_product(outgoing: bool) -> None:
    shards = AxialShards(Group(None))
    factors = torch.randn(2, 6, *((5, 3) if outgoing else (3, 5)), dtype=torch.float64, requires_grad=True)
    terms = SummedTerms(shards, 5, outgoing)
    product = terms.product(factors)
    grad = torch.randn_like(product)
    product.backward(grad)
    assert factors.grad is not None
    close(terms.gradients(grad, factors.detach()), factors.grad)


def _begin_before_the_gradient_comes(out: Tensor) -> None:
    """In the backward pass, between whatever gives the gradient and the operator that gets it."""
    begin = begins_backward(out)
    out.register_hook(lambda _: begin())


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("frozen", [(), ("norm_in.weight", "gate.bias", "norm_out.bias")])
@pytest.mark.parametrize("name", ["outgoing", "incoming"])
def test_terms_of_sums_give_the_layer_and_its_gradients_on_rows(
    name: str, frozen: tuple[str, ...], begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On three ranks with uneven shards, matrices padded as on a GPU, dropout, and whatever is begun before."""
    monkeypatch.setattr(matmul, "_width", lambda x, n: padded_width(n))
    pair, mask = inputs_of(CASES[name], (2,))
    factors = torch.bernoulli(torch.full((2, 1, RESIDUES, C_Z), 0.7, dtype=pair.dtype)).div_(0.7)
    weight = torch.randn_like(pair)

    def layer() -> TriangleMultiplication:
        found = plain_module(CASES[name])
        found.dropout = _Given(factors)
        for parameter, values in found.named_parameters():
            values.requires_grad_(parameter not in frozen)
        return found  # type: ignore[return-value]

    plain, whole = layer(), pair.clone().requires_grad_()
    expected = plain(whole, mask)
    (expected * weight).sum().backward()

    def run(group: Group) -> dict[str, Tensor]:
        shards, ours = AxialShards(group), layer()
        ours = convert_modules(ours, {type(ours): AxialTriangleMultiplication}, shards=shards)
        cut = -2 if name == "outgoing" else -3
        own = shards.take(pair, cut).clone().requires_grad_()
        found = ours.by_terms(own, shards.take(mask, -1 if name == "outgoing" else -2), None)
        close(found, shards.take(expected, -3))
        if begins:
            _begin_before_the_gradient_comes(found)
        (found * shards.take(weight, -3)).sum().backward()
        assert own.grad is not None
        close(own.grad, shards.take(whole.grad, cut))
        return {key: x.grad for key, x in ours.named_parameters() if x.grad is not None}

    found = on_one_line(3, run)
    for key, values in plain.named_parameters():
        assert (values.grad is None) == (key in frozen)
        if values.grad is None:
            assert all(key not in rank for rank in found)
        else:
            close(sum(rank[key] for rank in found), values.grad)


class _Watching(TorchDispatchMode):
    """Writes down which halves of the operator and which matrix products are computed."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("fastfold::")
        if name.startswith("triangle_") or name == "aten::bmm":
            self._order.append(name)
        return func(*args, **(kwargs or {}))


def test_a_backward_pass_makes_factors_while_the_gradient_before_it_travels() -> None:
    """What is begun is not made a second time, and what is handed over is done between the start and the wait."""
    pair, mask = inputs_of(CASES["incoming"], ())
    order: list[str] = []

    def run(group: Group) -> None:
        shards, ours = AxialShards(group), plain_module(CASES["incoming"]).eval()
        ours = convert_modules(ours, {type(ours): AxialTriangleMultiplication}, shards=shards)
        rows = shards.take(pair, -3).clone().requires_grad_()
        own_order = order if group.rank == 0 else []
        found = ours.by_terms(rows, shards.take(mask, -2), lambda: own_order.append("meanwhile"))
        with _Watching(own_order):
            _begin_before_the_gradient_comes(found)
            found.sum().backward()

    on_one_line(2, run)
    assert order[:3] == ["triangle_factors", "triangle_update_backward", "meanwhile"]
    assert order.count("triangle_factors") == 1
    assert order[-1] == "triangle_factors_backward"
