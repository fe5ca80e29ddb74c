"""Weights that get other memory, stages that share them, sparse and second gradients: right or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, ParallelPlan, parallelize
from fastfold.parallel.comm.collectives import first_order
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.tensor_parallel import ParallelMLP
from tests.helpers.spawn_ranks import launch

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _model() -> nn.Module:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    return nn.Sequential(mlp, nn.Tanh(), nn.Linear(6, 3)).double()


def _sgd(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1, momentum=0.5)


def _penalized(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.square().sum() + slope.square().sum()


def _new_weights() -> None:
    for zero in (1, 2):
        plain = _model()
        parallel = parallelize(copy.deepcopy(plain), {"dp": 2, "zero": zero})
        pairs = (plain, _sgd(dict(plain.named_parameters()))), (parallel.module, parallel.optimizer(_sgd))
        for number in range(3):
            if number == 1:
                flat = torch.linspace(-1, 1, sum(p.numel() for p in plain.parameters()), dtype=torch.float64)
                for model, _ in pairs:
                    nn.utils.vector_to_parameters(flat, model.parameters())
            for model, optimizer in pairs:
                optimizer.zero_grad()
                x = X if model is plain else X[parallel.rows(len(X))]
                model(x).square().sum().backward()
                if model is not plain:
                    parallel.reduce_gradients()
                optimizer.step()
        for name, x in parallel.state_dict().items():
            assert torch.allclose(x, plain.state_dict()[name], atol=1e-12), (zero, name)
    for zero in range(3):
        parallel = parallelize(_model(), {"dp": 2, "zero": zero})
        optimizer = parallel.optimizer(_sgd)
        state = {name: x.clone() for name, x in parallel.module.state_dict().items()}
        parallel.module.load_state_dict(state, assign=True)
        parallel.module(X).sum().backward()
        parallel.reduce_gradients()
        with pytest.raises(ConfigError, match=r"0\.0\.weight was replaced .*assign=True"):
            optimizer.step()


def _second_derivatives() -> None:
    plain = _model()
    expected = torch.autograd.grad(_penalized(plain, X), list(plain.parameters()))
    layers = {"0": ParallelMLP.from_plain}
    for plan in ({"tp": 2}, {"dp": 2, "zero": 2}):
        parallel: Parallel = parallelize(copy.deepcopy(plain), plan, layers=layers if "tp" in plan else None)
        _penalized(parallel.module, X[parallel.rows(len(X))]).backward()
        parallel.reduce_gradients()
        found = parallel.plain(
            parallel.gradients.whole({n: p.grad for n, p in parallel.gradients.optimized.items()})
        )
        for (name, _), gradient in zip(plain.named_parameters(), expected, strict=True):
            assert torch.allclose(found[name], gradient, atol=1e-12), (plan, name)
    parallel = parallelize(_model(), {"dp": 2, "zero": 3})
    with pytest.raises(ConfigError, match=r"create_graph=True .* use zero=0, 1 or 2"):
        _penalized(parallel.module, X)


def _sparse() -> None:
    table = nn.Embedding(5, 4, sparse=True)
    parallel = parallelize(table, {"dp": 2})
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match=r"a sparse one of shape \[5, 4\].*sparse=False"):
        parallel.reduce_gradients()


def _all() -> None:
    _new_weights()
    _second_derivatives()
    _sparse()


def test_new_memory_second_derivatives_and_sparse_gradients() -> None:
    launch(_all, 2)


def test_a_block_with_a_buffer_in_two_stages_is_refused() -> None:
    """Each stage would change its own copy; shared parameters alone are summed."""
    shared = nn.Linear(2, 2)
    shared.register_buffer("scale", torch.ones(2))

    def stages(model: nn.Module, count: int) -> list[nn.Module]:
        return [nn.Sequential(shared), nn.Sequential(shared)]

    with (
        fake_mesh(ParallelPlan(pp=2)) as mesh,
        pytest.raises(ConfigError, match=r"0\.scale is a buffer of the pipeline's stages 0 and 1"),
    ):
        parallelize(nn.Sequential(shared), mesh, stages=stages)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_second_derivative_of_messages_is_refused_in_the_first_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    _Once.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"create_graph=True .* tp in 1d"):
        torch.autograd.grad(_Once.apply(x).sum(), x, create_graph=True)
