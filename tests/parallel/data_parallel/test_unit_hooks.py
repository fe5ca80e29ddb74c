"""Stage 3 with nested blocks, experts chosen by the data and tensor parallelism: right, or refused at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastfold.errors import ConfigError
from fastfold.parallel import parallelize
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.kept_gradients import changed_message, is_kept, keep_gradients
from fastfold.parallel.data_parallel.units import UnitCalls, UnitWeights
from fastfold.parallel.tensor_parallel import ParallelMLP
from tests.helpers.spawn_ranks import launch

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class _Nested(nn.Module):
    """A list of blocks with lists of layers, as in T5 and U-Nets; blocks are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class _Experts(nn.Module):
    """Experts that a call names, and those whose results count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.double()

    def forward(self, x: Tensor, called: list[int], counted: list[int]) -> Tensor:
        results = {number: self.experts[number](x) for number in called}
        return sum((results[number] for number in counted), x.sum())  # type: ignore[return-value]


class _Perceptrons(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return self.head(x)  # type: ignore[no-any-return]


def _sgd(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)


def _nested() -> None:
    plain = _Nested()
    parallel = parallelize(copy.deepcopy(plain), {"dp": 2, "zero": 3})
    expected, found = _sgd(dict(plain.named_parameters())), parallel.optimizer(_sgd)
    for _ in range(2):
        plain(X).square().sum().backward()
        parallel.module(X[parallel.rows(len(X))]).square().sum().backward()
        parallel.reduce_gradients()
        for optimizer in (expected, found):
            optimizer.step()
            optimizer.zero_grad()
    for name, x in parallel.state_dict().items():
        assert torch.allclose(x, plain.state_dict()[name], atol=1e-12), name
    parallel.module(X).sum().backward()
    with pytest.raises(ConfigError, match=r"call reduce_gradients\(\)"):
        found.step()


def _experts() -> None:
    rank = dist.get_rank()
    for called, message in (
        ([0, 1 + rank], r"calls experts\.[12] while another calls experts\.[12]"),
        ([0, 1, 2][: 2 + rank], r"calls experts\.2|ends the pass"),
    ):
        parallel = parallelize(_Experts(), {"dp": 2, "zero": 3})
        with pytest.raises(
            ConfigError, match=f"zero=3 all ranks have to use the same parameters .*{message}"
        ):
            parallel.module(X, called, called)
    parallel = parallelize(_Experts(), {"dp": 2, "zero": 3})
    loss = parallel.module(X, [0, 1, 2], [0, 1, 2][: 2 + rank]).sum()
    with pytest.raises(ConfigError, match=r"goes back through experts\.[12] while another"):
        loss.backward()
    parallel = parallelize(_Experts(), {"dp": 2, "zero": 3})
    parallel.module(X, [0, 2], [2]).sum().backward()
    parallel.reduce_gradients()


class _Bounded(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(6, 6)
        self.how = how
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        if self.how == "data":
            self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def _bounded_weights() -> None:
    for how in ("in place", "data"):
        for model, name in (
            (_Bounded(how), "the module"),
            (nn.Sequential(nn.ModuleList([_Bounded(how)])), "0.0"),
        ):
            parallel = parallelize(model, {"dp": 2, "zero": 3})
            part = parallel.module if name == "the module" else parallel.module[0][0]
            with pytest.raises(ConfigError, match=rf"forward\(\) of {name} changes weights in place.*zero=3"):
                part(X)
    parallelize(_Bounded("never"), {"dp": 2, "zero": 3}).module(X).sum().backward()


class _Optional(nn.Module):
    """One unit, of which a call uses one or both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.double()

    def forward(self, x: Tensor, has_both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if has_both else x


def _optional_layers() -> None:
    for is_listed in (False, True):
        part = _Optional()
        parallel = parallelize(
            nn.Sequential(nn.ModuleList([part])) if is_listed else part, {"dp": 2, "zero": 3}
        )
        for has_both in (True, False):
            part(X, has_both).sum().backward()
        message = (
            f"one has gradients of (42|84) elements of {'0.0' if is_listed else 'the module'} while another"
        )
        with pytest.raises(ConfigError, match=message):
            part(X, dist.get_rank() == 0).sum().backward()
        del parallel


def _hooks() -> None:
    parallel = parallelize(nn.Linear(6, 6).double(), {"dp": 2, "zero": 3})
    optimizer, seen = parallel.optimizer(_sgd), []
    parallel.module.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))  # type: ignore[union-attr]
    parallel(X).sum().backward()
    optimizer.step()
    assert len(seen) == 1
    optimizer.zero_grad()
    parallel.module.weight.register_hook(lambda x: 2 * x)  # type: ignore[union-attr]
    parallel(X).sum().backward()
    with pytest.raises(
        ConfigError, match=r"weight has a hook of register_hook\(\), which zero=3 does not call"
    ):
        optimizer.step()


def _inference_mode() -> None:
    plain = _Perceptrons()
    parallel = parallelize(copy.deepcopy(plain), {"dp": 2, "zero": 3})
    with torch.inference_mode():
        assert torch.allclose(parallel(X), plain(X), atol=1e-12)
        with pytest.raises(ConfigError, match=r"cannot train after .*use torch.no_grad\(\)"):
            parallel.module(X)
    parallel(X).sum().backward()


def _optimizers() -> None:
    parallel = parallelize(nn.Linear(6, 6).double(), {"dp": 2, "zero": 3})
    optimizer = parallel.optimizer(lambda named: torch.optim.Rprop(named.values(), foreach=False))
    parallel(X).sum().backward()
    with pytest.raises(ConfigError, match=r"Rprop cannot step parameters that zero=3 shards .*use zero=2"):
        optimizer.step()


def _two_ranks() -> None:
    _optimizers()
    _inference_mode()
    _hooks()
    _optional_layers()
    _bounded_weights()
    _nested()
    _experts()


def test_blocks_in_blocks_are_right_and_other_experts_are_refused_at_once() -> None:
    """Also with recomputed blocks, and where a rank calls more units, or goes back through fewer."""
    launch(_two_ranks, 2)


def _with_tensor_parallelism() -> None:
    plain = _Perceptrons()
    layers = {"parts.*": ParallelMLP.from_plain}
    parallel = parallelize(copy.deepcopy(plain), {"tp": 2, "dp": 2, "zero": 3}, layers=layers)
    expected, found = _sgd(dict(plain.named_parameters())), parallel.optimizer(_sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        plain(X).square().sum().backward()
        expected.step()
        expected.zero_grad()
        scaler.scale(parallel.module(X[parallel.rows(len(X))]).square().sum()).backward()
        parallel.reduce_gradients()
        scaler.step(found)
        scaler.update()
        found.zero_grad()
    for name, x in parallel.state_dict().items():
        assert torch.allclose(x, plain.state_dict()[name], atol=1e-12), name
    for name, states in found.state_dict()["state"].items():
        momentum = expected.state[plain.get_parameter(name)]["momentum_buffer"]
        assert torch.allclose(states["momentum_buffer"], momentum, atol=1e-12), name
    assert parallel.sharded_state_dict().keys() == plain.state_dict().keys()
    parallel.module(X[parallel.rows(len(X))]).square().sum().backward()
    parallel.reduce_gradients()
    nn.utils.clip_grad_norm_(parallel.module.parameters(), 1e-3)
    with pytest.raises(ConfigError, match=r"changed after reduce_gradients\(\).*clip_grad_norm_\(\)"):
        found.step()


def test_stage_3_with_tensor_parallelism_trains_saves_and_refuses_foreign_clipping() -> None:
    launch(_with_tensor_parallelism, 4)


def test_one_rank_compares_nothing() -> None:
    calls = UnitCalls(nn.Linear(1, 1), [], Group(None))
    calls.end_step()


def test_gradients_that_changed_are_told_from_those_that_were_kept() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    kept = keep_gradients({"weight": layer.weight, "bias": layer.bias})
    assert is_kept(layer.weight.grad, kept.get("weight"))
    assert is_kept(layer.bias.grad, kept.get("bias"))
    layer.weight.grad.mul_(2)
    assert not is_kept(layer.weight.grad, kept.get("weight"))
    assert not is_kept(torch.ones(2), kept.get("bias"))
    assert "gradient of bias changed" in changed_message("bias")


def test_versions_and_norms_tell_changed_weights() -> None:
    layer = _Bounded("data")
    UnitWeights(layer, [])
    with pytest.raises(ConfigError, match=r"forward\(\) of the module changes weights"):
        layer(X)
    layer(X)  # they are within bounds


def test_weights_that_are_not_numbers_count_as_unchanged() -> None:
    """A run that has diverged is not told that its forward pass changes weights."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0] = torch.nan
        layer.bias[0] = torch.inf
    UnitWeights(layer, [])
    layer(torch.ones(1, 2))
