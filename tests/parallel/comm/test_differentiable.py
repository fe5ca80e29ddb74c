"""A collective under way: started where it is asked for, finished where it is waited for, mirrored backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.parallel.comm.async_handle import Handle, JointHandle
from fastfold.parallel.comm.async_ops import AsyncResult


class _Doubling:
    """In place of a collective whose adjoint multiplies by five; notes what happens when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def _start(self, name: str, x: Tensor, factor: float) -> AsyncResult:
        assert not x.requires_grad
        self.events.append(f"start {name}")

        def finish() -> Tensor:
            self.events.append(f"finish {name}")
            return x * factor

        return AsyncResult(finish)

    def handle(self, x: Tensor) -> Handle:
        return Handle(x, lambda t: self._start("forward", t, 2.0), lambda g: self._start("backward", g, 5.0))


def test_what_is_computed_meanwhile_lies_between_both_ends_in_both_directions() -> None:
    log = _Doubling()
    x, y = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor(1.0, requires_grad=True)
    y.register_hook(lambda gradient: log.events.append("meanwhile"))
    handle = log.handle(x)
    assert log.events == ["start forward"]
    meanwhile = y * 3.0
    result = handle.wait()
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
    joint = JointHandle(
        [x],
        lambda tensors: [log._start("forward", tensors[0], 2.0)],
        lambda gradients: [log._start("backward", g, 5.0) for g in gradients if g is not None],
    )
    (result,) = joint.meanwhile(lambda: log.events.append("meanwhile")).wait()
    for _ in range(2):
        log.events.clear()
        result.sum().backward(retain_graph=True)
        assert log.events == ["start backward", "meanwhile", "finish backward"]


def test_a_result_is_made_once_however_often_it_is_asked_for() -> None:
    log = _Doubling()
    handle = log.handle(torch.ones(2, requires_grad=True))
    first = handle.wait()
    assert handle.wait() is first
    assert log.events == ["start forward", "finish forward"]


def test_without_gradients_nothing_is_recorded() -> None:
    log = _Doubling()
    with torch.no_grad():
        result = log.handle(torch.ones(2, requires_grad=True)).wait()
    assert not result.requires_grad
    assert not log.handle(torch.ones(2)).wait().requires_grad


def test_a_result_that_is_its_input_is_another_tensor_of_the_graph() -> None:
    """As a collective over one rank gives back what it gets."""
    x = torch.ones(2, requires_grad=True)
    out = Handle(x, lambda t: AsyncResult(lambda: t), lambda g: AsyncResult(lambda: g)).wait()
    (out * torch.tensor([2.0, 3.0])).sum().backward()
    assert out is not x
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]
