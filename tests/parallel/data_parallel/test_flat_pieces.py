"""Optimizers of whole parameters step flat pieces of them as if they had the whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan, parallelize
from fastfold.parallel.data_parallel.large_batch import Lamb
from fastfold.parallel.data_parallel.optimizer import on_pieces
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.tensor_parallel import ParallelLinear

Named = Mapping[str, nn.Parameter]


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in (("matrix", (3, 5)), ("bias", (5,)), ("scale", ()))
    }


def _first_pieces(parameters: Named) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(p.detach().reshape(-1)[:2].clone()) for name, p in parameters.items()}


def _by_dimension(named: Named) -> Optimizer:
    groups = [
        {"params": [p for p in named.values() if p.dim() == 2], "weight_decay": 0.5},
        {"params": [p for p in named.values() if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1)


@pytest.mark.parametrize(
    "factory", [_by_dimension, lambda named: torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)]
)
def test_pieces_step_as_the_same_part_of_whole_parameters(factory) -> None:
    parameters = _parameters()
    pieces = _first_pieces(parameters)
    whole, ours = factory(parameters), on_pieces(factory, parameters, pieces)
    assert [len(group["params"]) for group in ours.param_groups] == [
        len(g["params"]) for g in whole.param_groups
    ]
    for step in range(3):
        for name, p in parameters.items():
            p.grad = torch.full_like(p, 0.3 + step)
            pieces[name].grad = torch.full_like(pieces[name], 0.3 + step)
        whole.step()
        ours.step()
    for name, p in parameters.items():
        torch.testing.assert_close(pieces[name], p.reshape(-1)[:2], rtol=1e-12, atol=1e-12)


def test_layerwise_optimizers_know_the_pieces_by_their_names() -> None:
    parameters = _parameters()
    pieces = _first_pieces(parameters)
    optimizer = on_pieces(lambda named: Lamb(named, lr=0.1), parameters, pieces)
    assert isinstance(optimizer, Lamb)
    assert {name: p for p, name in optimizer.names.items()} == pieces


@pytest.mark.parametrize(
    ("name", "factory"),
    [
        ("Adafactor", lambda named: torch.optim.Adafactor(named.values(), lr=0.1)),
        ("Muon", lambda named: torch.optim.Muon([named["matrix"]], lr=0.1)),
    ],
)
def test_optimizers_that_look_at_whole_parameters_are_refused(name: str, factory) -> None:
    parameters = _parameters()
    with pytest.raises(ConfigError, match=rf"{name} needs whole parameters"):
        on_pieces(factory, parameters, _first_pieces(parameters))


@pytest.mark.parametrize(
    ("name", "factory", "is_refused"),
    [
        ("Adafactor", lambda named: torch.optim.Adafactor(named.values(), lr=0.1), True),
        ("Muon", lambda named: torch.optim.Muon([p for p in named.values() if p.dim() == 2], lr=0.1), True),
        ("AdamW", _by_dimension, False),
        ("Lamb", lambda named: Lamb(named, lr=0.1), False),
    ],
)
def test_optimizers_of_whole_parameters_are_refused_where_layers_are_cut(
    name: str, factory, is_refused: bool
) -> None:
    layers = {
        str(place): partial(ParallelLinear.from_plain, role=role)
        for place, role in ((0, "first"), (2, "second"))
    }
    with fake_mesh(ParallelPlan(tp=2)) as mesh:
        parallel = parallelize(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), mesh, layers=layers
        )
        if not is_refused:
            parallel.optimizer(factory)
            return
        with pytest.raises(ConfigError, match=rf"{name} needs whole parameters, and tp cuts .* \(0.weight\)"):
            parallel.optimizer(factory)


class _Factored(Optimizer):
    """Second moments of rows and columns, for matrices of a size."""

    def __init__(self, parameters, side: int) -> None:
        super().__init__(parameters, {"side": side})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                square = p.grad.square()
                if p.dim() == 2 and min(p.shape) >= group["side"]:
                    square = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
                p.sub_(p.grad / (square.sqrt() + 1e-8), alpha=0.01)


class _Adaptive(Optimizer):
    """A rate by the norm of all gradients, after some steps."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"count": 0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            square = sum(p.grad.square().sum() for p in group["params"])
            rate = 0.1 if group["count"] <= 10 else 0.1 / float(square) ** 0.5
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate)


def test_what_looks_at_whole_parameters_from_a_size_or_a_step_on_is_refused() -> None:
    parameters = {
        "table": nn.Parameter(torch.zeros(1000, 130)),
        "same": nn.Parameter(torch.zeros(1000, 130)),
        "filter": nn.Parameter(torch.zeros(64, 64, 3, 3)),
    }
    pieces = {name: nn.Parameter(p.detach().reshape(-1)[:2].clone()) for name, p in parameters.items()}
    for factory in (
        lambda named: _Factored(named.values(), side=128),
        lambda named: _Adaptive(named.values()),
    ):
        with pytest.raises(ConfigError, match="needs whole parameters"):
            on_pieces(factory, parameters, pieces)
    on_pieces(lambda named: _Factored(named.values(), side=2000), parameters, pieces)
