"""ZeRO stage 3: units are gathered one at a time, and gradients, norms and states lie in PyTorch's shards."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelMesh, ParallelPlan, parallelize
from fastfold.parallel.checks.units import check_units
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.fsdp import FullySharded
from fastfold.parallel.data_parallel.units import gathered_alone, listed_modules
from tests.helpers.spawn_ranks import launch


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 2)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """A mesh of one process, whose replicas are a process group all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Group(dist.group.WORLD, "replicas")
    yield SimpleNamespace(
        group=lambda name: group if name == "replicas" else Group(None),
        device_type="cpu",
        plan=ParallelPlan(),
    )
    dist.destroy_process_group()


def test_units_are_the_blocks_of_lists_that_have_parameters() -> None:
    net = _Net()
    assert listed_modules(net) == [net.blocks[0], net.blocks[2]]
    assert listed_modules(nn.Linear(1, 1)) == []


def _gradient(sharded: FullySharded, net: _Net) -> list[torch.Tensor]:
    net(torch.arange(6.0, dtype=torch.float64).view(2, 3)).square().sum().backward()
    return sharded.take_sample()


@pytest.mark.parametrize("alone", [True, False])
def test_gradients_are_sums_that_come_and_go_by_shards(alone: bool, world: Any) -> None:
    plain, net = _Net(), _Net()
    plain(torch.arange(6.0, dtype=torch.float64).view(2, 3)).square().sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    mesh: Any = (
        SimpleNamespace(group=lambda _: Group(None), device_type="cpu", plan=ParallelPlan())
        if alone
        else world
    )
    sharded = FullySharded(net, mesh, {})
    assert [isinstance(m, FSDPModule) for m in (net, net.blocks[0], net.head)] == [
        not alone,
        not alone,
        False,
    ]
    assert sharded.names == list(expected)
    assert all(isinstance(p, DTensor) != alone for p in sharded.optimized.values())
    buffers = _gradient(sharded, net)
    assert all(p.grad is None for p in net.parameters())
    assert not any(isinstance(buffer, DTensor) for buffer in buffers)
    square = sum(float(g.square().sum()) for g in expected.values())
    assert sharded.squared_norm(buffers).item() == pytest.approx(square)
    for buffer, zero in zip(buffers, sharded.zeros(), strict=True):
        assert buffer.shape == zero.shape
        assert not zero.any()
        buffer.mul_(2)  # of two samples alike
    sharded.finish(buffers)
    found = sharded.whole({name: p.grad for name, p in sharded.parameters.items() if p.grad is not None})
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], 2 * grad)
    assert sharded.gradient_square().item() == pytest.approx(4 * square)
    assert sharded.norms.total(
        {name: p.grad for name, p in sharded.parameters.items()}
    ).item() == pytest.approx(4 * square)
    # A parameter without a gradient counts as one of zeros.
    net.zero_grad()
    nothing = sharded.take_sample()
    assert [tuple(x.shape) for x in nothing] == [tuple(x.shape) for x in buffers]
    assert not any(x.any() for x in nothing)


def test_whole_tensors_become_shards_like_the_parameters_and_whole_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = _Net()
    monkeypatch.setattr("fastfold.parallel.data_parallel.fsdp.listed_modules", lambda module: [])
    sharded = FullySharded(net, world, {})
    assert not isinstance(net.blocks[0], FSDPModule)
    values = {name: torch.full(p.shape, 3.0, dtype=p.dtype) for name, p in sharded.parameters.items()}
    parts = sharded.part(values)
    for name, part in parts.items():
        like = sharded.parameters[name]
        assert isinstance(part, DTensor)
        assert (part.placements, part.device_mesh) == (like.placements, like.device_mesh)
    assert all(torch.equal(x, values[name]) for name, x in sharded.whole(parts).items())
    sharded.all_gather_params()


def test_one_process_without_a_group_keeps_plain_parameters() -> None:
    net = _Net()
    sharded = FullySharded(net, ParallelMesh(ParallelPlan()), {})
    assert sharded.stage == 3
    values = {name: torch.ones_like(p) for name, p in sharded.parameters.items()}
    assert sharded.part(values) == values
    assert "frozen.weight" not in sharded.parameters


def test_a_parameter_of_any_sample_has_a_gradient_after_the_step() -> None:
    """Of none it has none; a step without samples leaves zeros."""
    net = _Net()
    sharded = FullySharded(net, ParallelMesh(ParallelPlan()), {})

    def sample(*losses: Tensor) -> list[Tensor]:
        for loss in losses:
            loss.backward()
        return sharded.take_sample()

    x = torch.ones(2, 3, dtype=torch.float64)
    first, second = sample(net.blocks[0](x).sum()), sample(net.head(x).sum())
    sharded.finish([a + b for a, b in zip(first, second, strict=True)])
    present = {name for name, p in sharded.parameters.items() if p.grad is not None}
    assert present == {"blocks.0.weight", "blocks.0.bias", "head.weight", "head.bias"}
    assert torch.equal(net.head.weight.grad, x.sum(0).expand(2, 3))
    net.zero_grad()
    sharded.finish(sharded.zeros())
    assert all(p.grad is not None and not p.grad.any() for p in sharded.parameters.values())


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.tensor(1.0))


def _with_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda x: 2 * x)
    return layer


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (_with_hook(), "weight has a hook, which zero=3 would not call: use zero=0, 1 or 2"),
        (_Scaled(), "scale is a parameter without a dimension .* use zero=2"),
        (
            nn.ParameterList([torch.zeros(0, 6)]),
            r"0 is a parameter without elements \(\[0, 6\]\): .* use zero=2",
        ),
        (
            nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last),
            r"weight is not contiguous .* use zero=2, or call contiguous\(\)",
        ),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16)),
            "Sequential has parameters of torch.bfloat16 and torch.float32.*use zero=2, or convert them to one dtype",
        ),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused_before_any_is(module: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_units(module, [])


def test_units_of_one_dtype_each_may_differ() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    check_units(module, [module[1]])


def test_inner_units_come_first() -> None:
    outer = nn.Sequential(
        nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2))])[0]
    )
    units = gathered_alone(outer, [outer[0], outer[0][1]])
    assert units == [outer[0][1], outer[0]]


class _Failing(torch.autograd.Function):
    """The identity; its backward pass fails while ``fails`` is True."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if _Failing.fails:
            raise torch.OutOfMemoryError("simulated")
        return gradient


class _FailsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Failing.apply(self.first(x)))


def _skip_a_batch(zero: int) -> str:
    torch.manual_seed(0)
    parallel = parallelize(_FailsInside(), {"dp": 2, "zero": zero})
    optimizer = parallel.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    try:
        for step in range(3):
            _Failing.fails = step == 1
            optimizer.zero_grad()
            try:
                parallel(torch.ones(2, 4)).sum().backward()
            except torch.OutOfMemoryError:
                continue
            optimizer.step()
    except ConfigError as error:
        return str(error)
    finally:
        _Failing.fails = False
    return ""


class _Wrapped(nn.Linear):
    """Returns its result in an object that FSDP2 does not look into."""

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=super().forward(x).sum())


def _step_with_an_object() -> str:
    parallel = parallelize(_Wrapped(4, 2), {"dp": 2, "zero": 3})
    optimizer = parallel.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    parallel(torch.ones(2, 4)).loss.backward()
    try:
        optimizer.step()
    except ConfigError as error:
        return str(error)
    return ""


def _skip_batches() -> list[str]:
    return [_step_with_an_object(), *(_skip_a_batch(zero) for zero in range(4))]


def test_parameters_that_stay_gathered_are_refused_under_stage_three_alone() -> None:
    for hidden, *others, refused in launch(_skip_batches, 2):
        assert "forward() returned its result in something other than tensors" in hidden
        assert others == [""] * 3
        assert "an error ended an earlier backward pass" in refused
        assert "use zero=2" in refused
