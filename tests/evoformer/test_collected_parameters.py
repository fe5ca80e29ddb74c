"""Layers collect their parameters once, and see each change of them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import layer_norm, linear
from torch.nn.utils import parametrize

from fastfold.evoformer.config import model_config
from fastfold.evoformer.transition import Transition
from fastfold.evoformer.triangle_attention import TriangleAttention
from tests.helpers.networks import oracle_config


def _layer(seed: int = 0) -> Transition:
    config = oracle_config().model.embeddings_and_evoformer.evoformer.pair_transition
    torch.manual_seed(seed)
    return Transition(config, 8, zero_init=False).eval()


def _expected(layer: Transition, x: Tensor) -> Tensor:
    normed = layer_norm(x, [8], layer.norm.weight, layer.norm.bias)
    hidden = linear(normed, layer.hidden.weight, layer.hidden.bias).relu()
    return x + linear(hidden, layer.output.weight, layer.output.bias)


@torch.no_grad()
def _check(layer: Transition, x: Tensor) -> None:
    for _ in range(2):
        torch.testing.assert_close(layer(x), _expected(layer, x))


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


CHANGES: dict[str, Callable[[Transition], Any]] = {
    "in place": lambda layer: layer.hidden.weight.data.mul_(3),
    "new memory": lambda layer: setattr(layer.hidden.weight, "data", 3 * layer.hidden.weight),
    "parameter": lambda layer: setattr(layer.hidden, "weight", nn.Parameter(3 * layer.hidden.weight)),
    "layer": lambda layer: setattr(layer, "output", nn.Linear(32, 8)),
    "state": lambda layer: layer.load_state_dict(_layer(1).state_dict()),
    "assigned state": lambda layer: layer.load_state_dict(_layer(1).state_dict(), assign=True),
    "computed": lambda layer: parametrize.register_parametrization(layer.hidden, "weight", _Twice()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters_are_used_at_once(change: str) -> None:
    layer, x = _layer(), torch.randn(3, 5, 8)
    _check(layer, x)
    with torch.no_grad():
        before = layer(x)
        CHANGES[change](layer)
        assert not torch.equal(layer(x), before)
    _check(layer, x)


def test_a_computed_weight_is_read_at_each_call() -> None:
    layer, x = _layer(), torch.randn(3, 5, 8)
    parametrize.register_parametrization(layer.hidden, "weight", _Twice())
    _check(layer, x)
    with torch.no_grad():
        layer.hidden.parametrizations.weight.original.add_(1)
    _check(layer, x)


def test_parameters_of_a_functional_call_are_used_in_it_alone() -> None:
    layer, other, x = _layer(), _layer(1), torch.randn(3, 5, 8)
    _check(layer, x)
    with torch.no_grad():
        found = functional_call(layer, dict(other.named_parameters()), (x,))
    torch.testing.assert_close(found, _expected(other, x))
    _check(layer, x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_use_their_own_parameters(duplicate: Callable[[Transition], Transition]) -> None:
    layer, x = _layer(), torch.randn(3, 5, 8)
    _check(layer, x)
    other = duplicate(layer)
    with torch.no_grad():
        other.hidden.weight.mul_(3)
    _check(other, x)
    _check(layer, x)


def test_a_replica_uses_its_own_tables() -> None:
    """As in ``torch.nn.DataParallel``: attributes are those of the original, tables are not."""
    layer, other, x = _layer(), _layer(1), torch.randn(3, 5, 8)
    _check(layer, x)
    replica = layer._replicate_for_data_parallel()
    replica._modules = dict(other._modules)
    _check(replica, x)
    _check(layer, x)


def test_two_threads_share_a_layer() -> None:
    layer, x = _layer(), torch.randn(3, 5, 8)
    expected, wrong = _expected(layer, x).detach(), list[int]()

    @torch.inference_mode()
    def call() -> None:
        for _ in range(50):
            if not torch.allclose(layer(x), expected, atol=1e-5):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_training_uses_and_updates_the_parameters() -> None:
    layer, x = _layer().train(), torch.randn(3, 5, 8)
    _check(layer, x)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    _check(layer, x)


def test_a_missing_gate_may_be_added() -> None:
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer.triangle_attention_starting_node
    config.gating = False
    layer, x, mask = (
        TriangleAttention(config, 8, zero_init=False).eval(),
        torch.randn(5, 5, 8),
        torch.ones(5, 5),
    )
    with torch.no_grad():
        before = layer(x, mask)
        layer.attention.gate = nn.Linear(8, 8)
        assert not torch.equal(layer(x, mask), before)
