"""A collective under way: started where it is asked for, finished where it is waited for, mirrored backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import differentiable, differentiable_one


class _Doubling:
    """In place of a collective whose adjoint multiplies by five; notes what happens when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def _start(self, name: str, x: Tensor, factor: float) -> AsyncResult[Tensor]:
        assert not x.requires_grad
        self.events.append(f"start {name}")

        def finish() -> Tensor:
            self.events.append(f"finish {name}")
            return x * factor

        return AsyncResult(finish)

    def start(self, x: Tensor) -> AsyncResult[Tensor]:
        return differentiable_one(
            x, lambda t: self._start("forward", t, 2.0), lambda g: self._start("backward", g, 5.0)
        )


def test_what_is_computed_meanwhile_lies_between_both_ends_in_both_directions() -> None:
    log = _Doubling()
    x, y = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor(1.0, requires_grad=True)
    y.register_hook(lambda gradient: log.events.append("meanwhile"))
    pending = log.start(x)
    assert log.events == ["start forward"]
    meanwhile = y * 3.0
    result = pending.wait()
    assert log.events == ["start forward", "finish forward"]
    assert result.tolist() == [2.0, 6.0]
    log.events.clear()
    (result * meanwhile).sum().backward()
    assert log.events[0] == "start backward"
    assert log.events.count("start backward") == log.events.count("finish backward") == 1
    assert x.grad is not None
    assert x.grad.tolist() == [15.0, 15.0]  # 3 times 5, and not the factor of the forward pass


def test_a_backward_pass_calls_what_it_is_given_between_both_ends() -> None:
    log, x = _Doubling(), torch.ones(2, requires_grad=True)
    joint = differentiable(
        [x],
        lambda tensors: [log._start("forward", tensors[0], 2.0)],
        lambda gradients: [log._start("backward", g, 5.0) for g in gradients if g is not None],
        lambda: log.events.append("meanwhile"),
    )
    (result,) = joint.wait()
    for _ in range(2):
        log.events.clear()
        result.sum().backward(retain_graph=True)
        assert log.events == ["start backward", "meanwhile", "finish backward"]


def test_a_result_that_is_waited_for_twice_is_an_error() -> None:
    pending = _Doubling().start(torch.ones(2, requires_grad=True))
    pending.wait()
    with pytest.raises(RuntimeError, match="asked for twice"):
        pending.wait()


def test_without_gradients_nothing_is_recorded() -> None:
    log = _Doubling()
    with torch.no_grad():
        result = log.start(torch.ones(2, requires_grad=True)).wait()
    assert not result.requires_grad
    assert not log.start(torch.ones(2)).wait().requires_grad


def test_a_result_that_is_its_input_is_another_tensor_of_the_graph() -> None:
    """As a collective over one rank gives back what it gets."""
    x = torch.ones(2, requires_grad=True)
    out = differentiable_one(x, lambda t: AsyncResult(lambda: t), lambda g: AsyncResult(lambda: g)).wait()
    (out * torch.tensor([2.0, 3.0])).sum().backward()
    assert out is not x
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]
