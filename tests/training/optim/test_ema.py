"""Average of the weights: its definition, what it leaves alone, and that the weights come back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.training.optim.ema import ExponentialMovingAverage


class Net(nn.Module):
    """A parameter of its own, a frozen one, one under two names, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.randn(3, 2, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(2, dtype=dtype), requires_grad=False)
        self.shared = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.again = self.shared
        self.register_buffer("count", torch.zeros(1))


def move(model: nn.Module, seed: int) -> None:
    """Change what trains, as an optimiser would, and count in the buffer."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
        model.count += 1


def test_average_is_the_recursion_of_its_definition():
    model = Net()
    ema = ExponentialMovingAverage(model, 0.9)
    expected = model.own.detach().double()
    for step in range(5):
        move(model, step)
        ema.update()
        expected = 0.9 * expected + 0.1 * model.own.detach().double()
    torch.testing.assert_close(ema.tensors()["own"].double(), expected, rtol=1e-6, atol=1e-6)


def test_warm_up_lowers_the_first_decays_only():
    model = Net()
    slow, fast = (ExponentialMovingAverage(model, 0.5, warm_up=on) for on in (False, True))
    start = model.own.detach().clone()
    move(model, 0)
    slow.update()
    fast.update()
    torch.testing.assert_close(slow.tensors()["own"], start.lerp(model.own, 0.5))
    torch.testing.assert_close(fast.tensors()["own"], start.lerp(model.own, 1 - 2 / 11))
    fast.load_counters({"updates": 1000})
    before = fast.tensors()["own"].clone()
    fast.update()
    torch.testing.assert_close(fast.tensors()["own"], before.lerp(model.own, 0.5))


def test_swapped_in_model_is_the_average_and_comes_back_bit_by_bit():
    model = Net()
    ema = ExponentialMovingAverage(model, 0.9)
    move(model, 0)
    ema.update()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with ema.swapped_in():
        assert torch.equal(model.own, ema.tensors()["own"])
        assert not torch.equal(model.own, before["own"])
        assert torch.equal(model.again.weight, ema.tensors()["shared.weight"])
        assert torch.equal(model.frozen, before["frozen"])
        assert torch.equal(model.count, before["count"])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_weights_come_back_after_an_interrupt():
    model = Net()
    ema = ExponentialMovingAverage(model, 0.9)
    move(model, 0)
    ema.update()
    before = model.own.detach().clone()
    with pytest.raises(KeyboardInterrupt), ema.swapped_in():
        raise KeyboardInterrupt
    assert torch.equal(model.own, before)


def test_evaluation_leaves_the_average_alone():
    model = Net()
    ema = ExponentialMovingAverage(model, 0.9)
    move(model, 0)
    ema.update()
    before = ema.tensors()["own"].clone()
    with ema.swapped_in():
        move(model, 1)
    assert torch.equal(ema.tensors()["own"], before)


def test_frozen_parameters_have_no_average_and_shared_ones_have_one():
    assert set(ExponentialMovingAverage(Net()).tensors()) == {"own", "shared.weight"}


def test_average_of_bfloat16_weights_does_not_round_away():
    model = Net(torch.bfloat16)
    ema = ExponentialMovingAverage(model, 0.999)
    with torch.no_grad():
        model.own.add_(1.0)
    for _ in range(2000):
        ema.update()
    average = ema.tensors()["own"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, model.own.detach().float() - 0.999**2000, rtol=0, atol=2e-2)
    with ema.swapped_in():
        assert model.own.dtype == torch.bfloat16


def test_restored_average_continues_bit_equal():
    model = Net()
    ema = ExponentialMovingAverage(model, 0.9, warm_up=True)
    move(model, 0)
    ema.update()
    saved = {name: x.clone() for name, x in ema.tensors().items()}, ema.counters()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    move(model, 1)
    ema.update()
    other = Net()
    other.load_state_dict(weights)
    restored = ExponentialMovingAverage(other, 0.9, warm_up=True)
    for name, x in restored.tensors().items():
        x.copy_(saved[0][name])
    restored.load_counters(saved[1])
    move(other, 1)
    restored.update()
    assert all(torch.equal(x, restored.tensors()[name]) for name, x in ema.tensors().items())


def test_impossible_decay_is_refused():
    with pytest.raises(ConfigError, match="0 to 1"):
        ExponentialMovingAverage(Net(), 1.5)


def test_an_update_that_a_scalar_calls_off_is_none():
    model, other = Net(), Net()
    guarded = ExponentialMovingAverage(model, 0.9, warm_up=True)
    plain = ExponentialMovingAverage(other, 0.9, warm_up=True)
    for step, ok in enumerate((True, False, True, False, True)):
        if ok:
            move(model, step)
            move(other, step)
            plain.update()
        guarded.update(torch.tensor(ok))
        if not ok:
            guarded.forget_update()
        assert guarded.counters() == plain.counters()
        assert all(torch.equal(guarded.tensors()[name], x) for name, x in plain.tensors().items())
