"""Gradients that no single backward pass made: set by hand, of frozen parts, of two models that train each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from fastfold.errors import ConfigError
from fastfold.parallel import parallelize
from tests.helpers.spawn_ranks import launch

TASKS, STEPS = 2, 5  #: One task for each rank; all for a single process


def _network(seed: int, out: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, out)).double()


def _data(step: int, task: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + task)
    x, y = (torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return x, y


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1, momentum=0.5)


class _Model:
    """A network of one process, which sees all tasks, or of one of two ranks, which sees its own."""

    def __init__(self, zero: int | None, seed: int = 0, out: int = 2) -> None:
        plain = _network(seed, out)
        if zero is None:
            self.call: nn.Module = plain
            self.module: nn.Module = plain
            self.optimizer: Any = _sgd(dict(plain.named_parameters()))
            self.tasks = list(range(TASKS))
        else:
            self.call = parallelize(plain, {"dp": 2, "zero": zero})
            self.module = self.call.module  # type: ignore[assignment]
            self.optimizer = self.call.optimizer(_sgd)  # type: ignore[operator]
            self.tasks = [dist.get_rank()]

    def mean(self, loss: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([loss(task) for task in self.tasks]).mean()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: x.detach().clone() for name, x in self.call.state_dict().items()}


def _surgery(zero: int | None) -> dict[str, Tensor]:
    """Gradients of two losses, of which the second loses its part along the first; one layer's is left out."""
    model = _Model(zero)
    for step in range(STEPS):
        model.optimizer.zero_grad()

        def loss(task: int, step: int = step) -> Tensor:
            x, y = _data(step, task)
            return (model.call(x) - y).square().mean()

        total = model.mean(loss)
        # Stage 3 has gathered the parameters of the graph now.
        names, parameters = zip(*model.module.named_parameters(), strict=True)
        found = torch.autograd.grad(total, parameters)
        for name, parameter, gradient in zip(names, parameters, found, strict=True):
            parameter.grad = None if step % 2 and name.startswith("0") else gradient * 2
        model.optimizer.step()
    return model.weights


def _maml(zero: int | None) -> dict[str, Tensor]:
    """One inner step of each task by its own gradients, then the gradients of the tasks' later losses."""
    model = _Model(zero)
    for step in range(STEPS):
        model.optimizer.zero_grad()
        named = dict(model.module.named_parameters())

        def after_a_step(task: int, step: int = step, named: dict[str, Any] = named) -> Tensor:
            x, y = _data(step, task)
            first = (functional_call(model.module, named, x) - y).square().mean()
            slopes = torch.autograd.grad(first, list(named.values()), create_graph=True)
            fast = {name: p - 0.3 * g for (name, p), g in zip(named.items(), slopes, strict=True)}
            x, y = _data(step + 100, task)
            return (functional_call(model.module, fast, x) - y).square().mean()

        # A call of the model itself, so that a plan knows of the step.
        outer = model.mean(after_a_step) + 0.0 * model.call(_data(0, 0)[0]).sum()
        for parameter, gradient in zip(
            named.values(), torch.autograd.grad(outer, list(named.values())), strict=True
        ):
            parameter.grad = gradient
        model.optimizer.step()
    return model.weights


def _freezing(zero: int | None) -> dict[str, Tensor]:
    """The first layer is frozen between two steps, and trains again later."""
    model = _Model(zero)
    for step in range(STEPS):
        for parameter in model.module[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(step not in (1, 2))
        model.optimizer.zero_grad()

        def loss(task: int, step: int = step) -> Tensor:
            x, y = _data(step, task)
            return (model.call(x) - y).square().mean()

        model.mean(loss).backward()
        model.optimizer.step()
    return model.weights


def _gan(zero: int | None) -> dict[str, Tensor]:
    """Two models; each is frozen while the other trains, as Lightning's ``toggle_optimizer`` does."""
    maker, judge = _Model(zero, 0, 3), _Model(zero, 1, 1)
    for step in range(STEPS):
        for of_maker in (False, True):
            for model, trains in ((maker, of_maker), (judge, not of_maker)):
                model.optimizer.zero_grad()
                for parameter in model.module.parameters():
                    parameter.requires_grad_(trains)

            def loss(task: int, step: int = step, of_maker: bool = of_maker) -> Tensor:
                x, _ = _data(step, task)
                made = judge.call(maker.call(x)).mean()
                return -made if of_maker else made - judge.call(x).mean() + judge.call(x).square().mean()

            (maker if of_maker else judge).mean(loss).backward()
            (maker if of_maker else judge).optimizer.step()
    return maker.weights | {f"judge.{name}": x for name, x in judge.weights.items()}


LOOPS = {"surgery": _surgery, "maml": _maml, "freezing": _freezing, "gan": _gan}


def _compare(loops: list[str], stages: list[int]) -> list[tuple[str, float]]:
    found = []
    for loop in loops:
        expected = LOOPS[loop](None)
        before = _Model(None).weights
        assert any(not torch.equal(expected[name], x) for name, x in before.items() if name in expected)
        for zero in stages:
            weights = LOOPS[loop](zero)
            assert weights.keys() == expected.keys()
            apart = max(float((x - expected[name]).abs().max()) for name, x in weights.items())
            found.append((f"{loop}, zero {zero}", apart))
    return found


def test_steps_equal_those_of_one_process() -> None:
    for of_one in launch(_compare, 2, list(LOOPS), [0, 1, 2]):
        assert len(of_one) == 12
        for case, apart in of_one:
            assert apart < 1e-12, case


def _listed_before(zero: int) -> dict[str, Tensor]:
    """Gradients of parameters that were listed before the forward pass, which stage 3 gathers later."""
    model = _Model(zero)
    parameters = list(model.module.parameters())
    x, y = _data(0, 0)
    output = model.call(x)
    output.mul_(2.0)  # an output may be changed in place
    for parameter, gradient in zip(
        parameters, torch.autograd.grad((output - y).square().mean(), parameters), strict=True
    ):
        parameter.grad = gradient
    model.optimizer.step()
    return model.weights


def _refused(loops: list[Callable[[int], Any]]) -> Iterator[str]:
    for loop in loops:
        with pytest.raises(ConfigError) as refused:
            loop(3)
        yield str(refused.value)


def _stage_three() -> tuple[list[tuple[str, float]], list[str]]:
    return _compare(["freezing", "gan"], [3]), list(_refused([_surgery, _listed_before]))


def test_stage_three_trains_frozen_parts_and_names_what_it_cannot() -> None:
    for found, refused in launch(_stage_three, 2):
        for case, apart in found:
            assert apart < 1e-12, case
        assert len(refused) == 2
        assert all("use zero=0, 1 or 2" in message for message in refused)
