"""Stages of a pipeline are compared with the model that they should compose to, without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan, parallelize
from fastfold.parallel.checks.stages import StageComparison
from fastfold.parallel.planner.fake_run import fake_mesh
from tests.parallel.foreign_models import build

X = torch.randn(4, 6, dtype=torch.float64)


class _Causal(nn.Module):
    """Attention whose mask is made by each block."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.dropout = nn.Linear(6, 18), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x), device=x.device)
        mask = (places[:, None] >= places) & torch.tensor(True)
        q, k, v = self.joint(x).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(~mask, -torch.inf)
        return x + self.dropout(scores.softmax(-1) @ v)


class _Named(nn.Module):
    """A stage that returns no tensor."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.part(x)}


def _halves(model: nn.Module, _: int) -> list[nn.Module]:
    parts = list(model.children())
    half = len(parts) // 2
    return [nn.Sequential(*parts[:half]), nn.Sequential(*parts[half:])]


def _compare(
    model: nn.Module, split: Callable[[nn.Module, int], Sequence[nn.Module]], *args: Any, **named: Any
) -> None:
    StageComparison(model.double(), split, 2).compare(args or (X,), named)


@pytest.mark.parametrize("name", ["perceptron", "weight norm", "prelu"])
def test_stages_that_compose_to_the_model_pass(name: str) -> None:
    _compare(build(name)[0], _halves)


def test_what_stages_compute_again_passes() -> None:
    """Masks and positions are made by each stage; parameters stay as they are."""
    model = nn.Sequential(_Causal(), _Causal(), nn.LayerNorm(6), nn.Linear(6, 2)).double()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    _compare(model, _halves)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two outputs", "compute another result than Calls"),
        ("low rank", "compute another result than Calls"),
        ("unused", "compute another result than Calls"),
        ("experts", "Calls cannot be traced .* pass compare_first=False"),
    ],
)
def test_stages_that_compute_something_else_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _compare(build(name)[0], _halves)


def test_the_order_of_stages_matters() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with pytest.raises(
        ConfigError, match="the 2 stages of the pipeline compute another result than Sequential"
    ):
        _compare(model, lambda m, _: [m[1], m[0]])


def test_results_that_cannot_be_sent_and_errors_name_their_stage() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with pytest.raises(ConfigError, match="stage 0 of 2 of the pipeline returns dict, expected a tensor"):
        _compare(model, lambda m, _: [_Named(m[0]), m[1]])
    with pytest.raises(ConfigError, match="stage 1 of 2 of the pipeline raises NotImplementedError"):
        _compare(model, lambda m, _: [m[0], nn.ModuleList([m[1]])])


def test_a_tuple_is_sent_if_all_of_it_are_tensors() -> None:
    class Pair(nn.Module):
        def __init__(self, part: nn.Module, more: Any) -> None:
            super().__init__()
            self.part, self.more = part, more

        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            return self.part(x), self.more

    class First(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor, more: Any) -> Tensor:
            return self.part(x)  # type: ignore[no-any-return]

    def split(more: Any) -> Callable[[nn.Module, int], list[nn.Module]]:
        return lambda model, _: [Pair(_halves(model, 2)[0], more), First(_halves(model, 2)[1])]

    _compare(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), split(X))
    with pytest.raises(ConfigError, match="stage 0 of 2 of the pipeline returns Tensor, str, expected"):
        _compare(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), split("more"))


def test_a_model_with_other_arguments_is_not_compared_and_no_model_twice() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    comparison = StageComparison(model, lambda m, _: [m[1], m[0]], 2)
    comparison.compare((X,), {"masks": X})
    comparison.compare((X,), {})


def test_a_stage_without_parameters_to_train_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 6))
    with (
        fake_mesh(ParallelPlan(pp=2)) as mesh,
        pytest.raises(ConfigError, match="stage 0 of 2 of the pipeline has no parameter to train"),
    ):
        parallelize(model, mesh, stages=lambda m, _: [nn.Sequential(m[0], m[1]), m[2]])
