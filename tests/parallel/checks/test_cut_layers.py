"""Modules with cut layers are compared with the plain ones at their first call, and refused where they differ."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelMesh, ParallelPlan, parallelize
from fastfold.parallel.checks.cut_layers import compare_first_calls
from fastfold.parallel.tensor_parallel import ParallelLinear
from fastfold.utils.module_structure import without_data
from tests.helpers.spawn_ranks import launch

WIDTH = 4


def _first(layer: nn.Module, mesh: ParallelMesh) -> nn.Module:
    return ParallelLinear.from_plain(layer, mesh, "first")  # type: ignore[arg-type]


def _second(layer: nn.Module, mesh: ParallelMesh) -> nn.Module:
    return ParallelLinear.from_plain(layer, mesh, "second")  # type: ignore[arg-type]


LAYERS: dict[str, Callable[[nn.Module, ParallelMesh], nn.Module]] = {
    "*.q": _first,
    "*.k": _first,
    "*.v": _first,
    "*.joint": _first,
    "*.output": _second,
}


class _Separate(nn.Module):
    """Queries, keys and values of three layers, and a factor of every head that is given and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.output = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = q if factor is None else q * factor
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), _Separate()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x), torch.arange(WIDTH).to(x.dtype))  # type: ignore[no-any-return]


class _Recomputed(nn.Module):
    """Counts what its block saves, which a comparison inside must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), _Separate()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.before(x), use_reentrant=False)  # type: ignore[no-any-return]


class _Fused(nn.Module):
    """One layer of queries, keys and values, and an output of zeros, under which all results are alike at first."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.output = nn.Linear(8, 24), nn.Linear(8, 8)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in self.joint(x).chunk(3, -1))
        return x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Scaled(_Separate):
    """A scale of each head's channels, whose gradient every rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q * self.scale, k, v)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Balanced(_Separate):
    """Leaves a term of the loss as an attribute, of which a rank has the part of its heads."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.penalty = self.q(x).square().mean()
        return super().forward(x)


class _Twisted(_Separate):
    """Has parameters of two dtypes, the first of which is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.twist = nn.Parameter(torch.ones(8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * self.twist.abs())


class _FixedHeads(_Separate):
    """Tells the number of heads, of which a rank has half."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _model(block: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(block, nn.Dropout(0.1), nn.Linear(8, 3)).double()


def _layers(model: nn.Module) -> dict[str, Callable[[nn.Module, ParallelMesh], nn.Module]]:
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return {pattern: cut for pattern, cut in LAYERS.items() if pattern[2:] in names}


def _on_two_ranks() -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for block, message in (
        (_Fused, r"0 with cut layers gives another result .*result 0: off by .*Partition\.heads"),
        (_Scaled, "0 with cut layers gives another result .*scale: off by"),
        (_Balanced, "0 with cut layers gives another result .*result penalty: off by"),
        (_FixedHeads, "0 with cut layers raises RuntimeError: unflatten"),
    ):
        model = _model(block())
        parallel = parallelize(model, {"tp": 2}, layers=_layers(model))
        with pytest.raises(ConfigError, match=message):
            parallel.module(x)
        model = _model(_Fused())
    parallel = parallelize(model, {"tp": 2}, layers=_layers(model), compare_first=False)
    parallel.module(x)

    for block in (_Separate, _Given, _Recomputed, _Twisted):
        plain = _model(block())
        model = copy.deepcopy(plain)
        parallel = parallelize(model, {"tp": 2}, layers=_layers(model))
        for _ in range(2):
            torch.manual_seed(2)
            expected = plain(x)
            torch.manual_seed(2)
            found = parallel.module(x)
            assert torch.allclose(found, expected, atol=1e-12)  # the comparison has drawn nothing
        assert all(p.grad is None for p in parallel.module.parameters())
        found.sum().backward()
    for seed in range(4):  # the gradient of a bias of keys is nothing but rounding errors
        parallel = parallelize(_model(_Separate()), {"tp": 2}, layers=_layers(_model(_Separate())))
        parallel.module(torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(seed), dtype=x.dtype))


def test_what_a_cut_mixes_up_is_refused_at_the_first_call() -> None:
    """Also under an output layer of zeros, and where only a gradient is incomplete; what is right trains on."""
    launch(_on_two_ranks, 2)


def test_a_copy_without_data_keeps_ties_and_flags() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layer[1].weight = layer[0].weight
    layer[0].bias.requires_grad_(False)
    copied = without_data(layer)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.is_meta
    assert not copied[0].bias.requires_grad
    assert not layer[0].weight.is_meta


def test_one_process_compares_nothing() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    compare_first_calls(module, {"": without_data(module)}, {"": _first}, ParallelMesh(ParallelPlan()))
    assert not module._forward_pre_hooks
