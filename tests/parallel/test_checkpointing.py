"""Activation checkpointing of foreign blocks changes no number, and copies recompute their own layers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fastfold.parallel.data_parallel.units import checkpoint_blocks, checkpointable_blocks


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.calls = nn.Linear(6, 6), nn.Dropout(0.3), 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * self.drop(self.layer(x).tanh())  # type: ignore[no-any-return]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.nested = nn.ModuleList([nn.ModuleList([_Block()])])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.nested[0]):
            x = block(x, scale=2.0)
        return x


def _gradients(net: _Net) -> list[Tensor]:
    torch.manual_seed(1)
    net(torch.ones(3, 6, dtype=torch.float64)).square().sum().backward()
    return [p.grad for p in net.parameters()]


def test_blocks_are_recomputed_and_gradients_stay() -> None:
    plain, net = _Net(), _Net()
    blocks = checkpointable_blocks(net)
    assert blocks == ["blocks.0", "blocks.1", "nested.0.0"]
    checkpoint_blocks(net, blocks)
    copied = copy.deepcopy(net)
    expected = _gradients(plain)
    for one in (net, copied):
        assert all(torch.equal(x, y) for x, y in zip(_gradients(one), expected, strict=True))
        assert [block.calls for block in one.blocks] == [2, 2]
    assert list(net.state_dict()) == list(plain.state_dict())


def test_blocks_inside_of_a_layer_that_was_cut_are_left_out() -> None:
    net = _Net()
    checkpoint_blocks(net, ["blocks.0", "blocks.1.inner.0"])
    assert ["forward" in vars(block) for block in net.blocks] == [True, False]


def test_running_statistics_are_not_updated_twice() -> None:
    net = _Net()
    net.norm = nn.BatchNorm1d(6)
    assert checkpointable_blocks(net) == []


def test_models_of_hugging_face_switch_it_on_themselves() -> None:
    class Foreign(_Net):
        supports_gradient_checkpointing = True

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
            self.given = gradient_checkpointing_kwargs

    net = Foreign()
    checkpoint_blocks(net, checkpointable_blocks(net))
    assert net.given == {"use_reentrant": False}
    assert all("forward" not in vars(block) for block in net.blocks)
