"""Layers that operators compute from their parameters: each change of their forward pass shows, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fastfold.errors import ConfigError
from fastfold.evoformer import EvoformerBlock
from fastfold.evoformer.execution import check_part, check_parts
from fastfold.evoformer.transition import Transition
from tests.helpers.networks import oracle_config, oracle_features, random_model, shallow_config

Change = Callable[[nn.Module, str], Any]


class _Adapted(nn.Module):
    """Layer around another, as PEFT's: its weight is that of the layer without the adapter."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
        self.out_features = len(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result.square()


def _replace(model: nn.Module, name: str) -> None:
    model.set_submodule(name, _Adapted(model.get_submodule(name)))


def _patch(model: nn.Module, name: str) -> None:
    layer = model.get_submodule(name)
    forward = layer.forward
    layer.forward = lambda *x: forward(*x).square()


def _hook(model: nn.Module, name: str) -> None:
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output.square())


CHANGES: dict[str, Change] = {"layer": _replace, "forward": _patch, "hook": _hook}


def _ignored(model: nn.Module, change: Change, run: Callable[[nn.Module], Sequence[Tensor]]) -> list[str]:
    """Names of layers whose change neither changes the result nor is refused, of the first block of each stack."""
    plain, ignored = run(model), []
    for name, module in model.named_modules():
        if not hasattr(module, "weight") or any(part.isdigit() and part != "0" for part in name.split(".")):
            continue
        changed = copy.deepcopy(model)
        run(changed)  # parameters are collected before the change
        change(changed, name)
        try:
            found = run(changed)
        except ConfigError:
            continue
        if all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)):
            ignored.append(name)
    return ignored


def _block() -> EvoformerBlock:
    torch.manual_seed(0)
    block = EvoformerBlock(oracle_config().model.embeddings_and_evoformer.evoformer, 16, 8).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    return block


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("gradients", [False, True])
def test_no_change_of_a_layer_of_a_block_is_ignored(change: str, gradients: bool) -> None:
    inputs = torch.randn(3, 5, 16), torch.randn(5, 5, 8), torch.ones(3, 5), torch.ones(5, 5)
    with torch.set_grad_enabled(gradients):
        assert _ignored(_block(), CHANGES[change], lambda block: block(*inputs)) == []


@pytest.mark.long
def test_no_hook_of_a_layer_of_a_network_is_ignored() -> None:
    features = oracle_features()

    def run(model: nn.Module) -> list[Tensor]:
        result = model(features)
        heads = [head["logits"] for head in result.values() if isinstance(head, dict) and "logits" in head]
        return [*heads, result["structure_module"]["final_atom_positions"]]

    with torch.no_grad():
        assert _ignored(random_model(shallow_config()), _hook, run) == []


def _transition() -> Transition:
    return Transition(
        oracle_config().model.embeddings_and_evoformer.evoformer.pair_transition, 8, zero_init=False
    )


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_refusal_names_the_layer_and_ways_to_change_it() -> None:
    layer, x = _transition(), torch.randn(3, 5, 8)
    handle = layer.hidden.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"^hidden of Transition has a forward pre-hook, .*parametrize"):
        layer(x)
    handle.remove()
    before = layer(x)
    parametrize.register_parametrization(layer.output, "weight", _Twice())  # a way that the message names
    assert not torch.equal(layer(x), before)
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)  # the other way
    parametrize.remove_parametrizations(layer.output, "weight", leave_parametrized=False)
    torch.testing.assert_close(layer(x), 2 * before)
    layer.hidden = nn.Embedding(32, 8)
    with pytest.raises(
        ConfigError, match=r"^hidden of Transition is a torch\.nn\.modules\.sparse\.Embedding"
    ):
        check_parts(layer)


def test_backward_hooks_are_refused_and_hooks_that_observe_are_not() -> None:
    layer = _transition()

    def observe(*_: Any) -> None:
        pass

    observe.observes = True  # type: ignore[attr-defined]
    layer.norm.register_forward_hook(observe)
    check_parts(layer)
    layer.norm.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="norm here has a backward hook"):
        check_part(layer.norm, "norm here")


def test_a_compiled_layer_is_checked_when_it_is_traced() -> None:
    layer, x = _transition(), torch.randn(3, 5, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))
    torch.compiler.reset()
    layer.hidden.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(Exception, match="hidden of Transition has a forward hook"):
        compiled(x)


def test_dropout_of_another_class_is_called() -> None:
    layer = _block().triangle_attention_starting.train()
    called = []

    class Dropout(nn.Module):
        def forward(self, x: Tensor) -> None:
            called.append(x.shape)

    layer.dropout = Dropout()
    layer(torch.randn(5, 5, 8), torch.ones(5, 5))
    assert called == [(5, 5, 8)]
