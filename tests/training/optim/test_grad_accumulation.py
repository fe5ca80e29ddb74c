"""Gradients are clipped sample by sample, then averaged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastfold.parallel import ParallelMesh, ParallelPlan
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.training.optim import grad_accumulation
from fastfold.training.optim.grad_accumulation import SampleGradients


def _gradients(parameters: list[nn.Parameter], clip: float) -> SampleGradients:
    """Of a process alone."""
    named = {str(number): p for number, p in enumerate(parameters) if p.requires_grad}
    return SampleGradients(Replicated(named, ParallelMesh(ParallelPlan()), {}), clip)


def _parameters(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([value])) for value in values]


def test_each_sample_is_clipped_on_its_own_and_the_mean_is_taken():
    a, b = _parameters(0.0, 0.0)
    gradients = _gradients([a, b], clip=1.0)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])  # norm 5: scaled to 1
    assert gradients.add_sample() == pytest.approx(5.0)
    a.grad, b.grad = torch.tensor([0.3]), torch.tensor([-0.4])  # norm 0.5: left as it is
    assert gradients.add_sample() == pytest.approx(0.5)
    assert a.grad is None
    gradients.finish(2)
    assert a.grad.item() == pytest.approx((0.6 + 0.3) / 2)
    assert b.grad.item() == pytest.approx((0.8 - 0.4) / 2)


def test_a_sample_that_is_not_finite_adds_nothing_and_says_so():
    a, b = _parameters(0.0, 0.0)
    gradients = _gradients([a, b], clip=1.0)
    a.grad, b.grad = torch.tensor([float("nan")]), torch.tensor([0.1])
    assert gradients.add_sample() != gradients.add_sample()  # NaN, the norm of nothing is not
    a.grad = torch.tensor([0.5])
    gradients.add_sample()
    gradients.finish(1)
    assert (a.grad.item(), b.grad.item()) == (0.5, 0.0)


def test_frozen_and_unused_parameters_stay_out():
    a, b, c = _parameters(0.0, 0.0, 0.0)
    b.requires_grad_(False)
    gradients = _gradients([a, b, c], clip=10.0)
    a.grad = torch.tensor([2.0])
    gradients.add_sample()
    gradients.finish(1)
    assert (a.grad.item(), b.grad, c.grad) == (2.0, None, None)


def test_what_was_added_can_be_forgotten():
    (a,) = _parameters(0.0)
    gradients = _gradients([a], clip=10.0)
    a.grad = torch.tensor([2.0])
    gradients.add_sample()
    gradients.discard()
    gradients.finish(1)
    assert a.grad.item() == 0.0


def test_without_looking_a_sample_that_is_not_finite_adds_nothing_either(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grad_accumulation, "reads_are_free", lambda device: False)
    a, b = _parameters(0.0, 0.0)
    gradients = _gradients([a, b], clip=1.0)
    for first, second in ((3.0, 4.0), (float("inf"), 0.1), (0.3, -0.4)):
        a.grad, b.grad = torch.tensor([first]), torch.tensor([second])
        gradients.add_sample()
    gradients.finish(2)
    assert a.grad.item() == pytest.approx((0.6 + 0.3) / 2)
    assert b.grad.item() == pytest.approx((0.8 - 0.4) / 2)
