"""Both halves of a triangle multiplication on any part of the pair, around a contraction that is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.kernels.ops.triangle_multiplication.contraction import ContractionPlan
from fastfold.memory import HostBuffers
from fastfold.parallel.alphafold.triangle_shard import ShardedTriangleMultiplication
from tests.helpers.definitions import close
from tests.parallel.alphafold.axial_cases import CASES, inputs_of, plain_module


def _layer(name: str) -> ShardedTriangleMultiplication:
    module = plain_module(CASES[name]).eval()
    module.__class__ = ShardedTriangleMultiplication
    return module  # type: ignore[return-value]


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
