"""Tensor parallel layers against plain ones, with every reduction left out in turn, and the bytes that they send."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastfold.errors import ConfigError
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import all_reduce
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.tensor_parallel import (
    ParallelAttention,
    ParallelEmbedding,
    ParallelLayerNorm,
    ParallelLinear,
    ParallelMLP,
    Partition,
    layers,
    layouts,
)
from tests.helpers.drop_reductions import undetected_reductions
from tests.helpers.spawn_ranks import BACKENDS, launch
from tests.helpers.thread_ranks import Line, together
from tests.parallel.plain_transformer import (
    FEATURES,
    Batch,
    Step,
    Transformer,
    gradients,
    make_parallel,
    make_plain,
    outer,
    to_plain,
)

PLANS = {
    2: [ParallelPlan(tp=2)],
    4: [ParallelPlan(tp=4), ParallelPlan(tp=4, tp_mode="2d"), ParallelPlan(dp=2, tp=2)],
    8: [
        ParallelPlan(tp=8, tp_mode="2.5d", tp_depth=2),
        ParallelPlan(tp=8, tp_mode="3d"),
        ParallelPlan(dp=2, tp=4, tp_mode="2d"),
    ],
}
REDUCTIONS = {2: [5], 4: [5, 30, 20], 8: [45, 37, 45]}


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number of the whole tensor."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    scale = expected.abs().max().item()
    assert scale > 0, "a tensor of zeros compares nothing"
    return (found - expected).abs().max().item() / scale


def _sum_over_replicas(model: Transformer, mesh: ParallelMesh) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = all_reduce(parameter.grad, mesh.group("replicas"))


def _differences(plain: Transformer, parallel: Transformer, mesh: ParallelMesh) -> dict[str, float]:
    """One step of both: largest difference of output, input gradient and each parameter's gradient."""
    batch = Batch()
    rows = mesh.group("replicas").shard(batch.ids.shape[0])
    layout = outer(mesh)
    parts = Partition.even(FEATURES, layout.features.size)
    expected = Step(plain, batch)
    found = Step(parallel, batch.part(rows), layout)
    _sum_over_replicas(parallel, mesh)
    differences = {
        "output": _difference(found.output, layout.take(expected.output[rows], parts)),
        "input gradient": _difference(
            found.input_gradient, layout.take(expected.input_gradient[rows], parts)
        ),
    }
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for name, gradient in gradients(parallel).items():
        differences[f"gradient of {name}"] = _difference(gradient, wanted.pop(name))
    assert not wanted
    return differences


def _check(differences: dict[str, float], where: object) -> float:
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] < 1e-12, f"{where}: {worst} differs by {differences[worst]}"
    return differences[worst]


def _equal_to_plain(plan: ParallelPlan) -> float:
    """Two blocks, one step compared in full and the parameters after three optimizer steps."""
    mesh, plain = ParallelMesh(plan), make_plain(2)
    parallel = make_parallel(plain, mesh)
    _check(
        {
            name: _difference(p, dict(plain.named_parameters())[name])
            for name, p in to_plain(parallel).items()
        },
        plan,
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9) for model in (plain, parallel)]
    worst = 0.0
    for number in range(3):
        worst = max(worst, _check(_differences(plain, parallel, mesh), f"{plan}, step {number}"))
        for optimizer in optimizers:
            optimizer.step()
    wanted = dict(plain.named_parameters())
    after = {name: _difference(p, wanted[name]) for name, p in to_plain(parallel).items()}
    return max(worst, _check(after, f"{plan}, parameters after three steps"))


def _undetected_without_a_reduction(plan: ParallelPlan) -> tuple[int, list[str]]:
    """How many reductions one step of one block has, and those whose absence changes nothing anywhere."""
    mesh, plain = ParallelMesh(plan), make_plain(1)
    parallel = make_parallel(plain, mesh)
    _check(_differences(plain, parallel, mesh), plan)
    return undetected_reductions(lambda: max(_differences(plain, parallel, mesh).values()))


def _sent(mesh: ParallelMesh, batch: int, features: int, outputs: int) -> tuple[float, float]:
    """Elements that this rank sends in the forward and in the backward pass of a linear layer without bias."""
    linear = nn.Linear(features, outputs, bias=False, dtype=torch.float64)
    layer = ParallelLinear.from_plain(linear, mesh)
    x = torch.zeros(batch, features, dtype=torch.float64)
    own = layer.before.take(x, layer.in_parts).requires_grad_()
    with mesh.record() as forward:
        y = layer(own)
    with mesh.record() as backward:
        y.sum().backward()
    return forward.sent / 8, backward.sent / 8


def _textbook(plan: ParallelPlan, m: int, n: int, k: int) -> tuple[float, float]:
    """The formulas for batch m, n features and k outputs."""
    p = plan.tp
    if plan.tp_mode == "1d":
        return 0, 2 * (p - 1) / p * m * n
    if plan.tp_mode == "3d":
        side = plan.tp_grid[0]
        share = (side - 1) / side**3
        return share * (m * n + n * k + m * k), share * (2 * m * n + 2 * n * k + m * k)
    depth, side, _ = plan.tp_grid
    forward = (side - 1) / side * (m * n / (side * depth) + n * k / side)
    return forward, 2 * forward + 2 * (depth - 1) / depth * n * k / side**2


def _saved_by_the_cube(mesh: ParallelMesh) -> None:
    """The layer keeps no gathered block for the backward pass."""
    layer = ParallelLinear.from_plain(nn.Linear(8, 12, bias=False, dtype=torch.float64), mesh)
    x = layer.before.take(torch.zeros(8, 8, dtype=torch.float64), layer.in_parts).requires_grad_()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    assert sum(tensor.numel() for tensor in saved) == x.numel() + layer.weight.numel() == (64 + 96) / 8


def _join_undoes_take(mesh: ParallelMesh) -> None:
    """Inner and outer layouts, the gradient included: each rank's loss asks for the whole."""
    batch = Batch()
    for layout in layouts(mesh):
        parts = Partition.heads(7, 3, layout.features.size)
        own = layout.take(batch.noise, parts).requires_grad_()
        joined = layout.join(own, len(batch.noise), parts)
        assert torch.equal(joined, batch.noise)
        joined.backward(batch.targets)
        ranks = layout.features.size * math.prod(group.size for group in layout.rows)
        assert own.grad is not None
        assert _difference(own.grad, ranks * layout.take(batch.targets, parts)) < 1e-12


def _recomputes(mesh: ParallelMesh) -> None:
    """Activation checkpointing around the layers gives the same gradients."""
    plain = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)).double()
    mlp = ParallelMLP.from_plain(plain, mesh)
    x = mlp.first.before.take(torch.ones(4, 6, dtype=torch.float64), mlp.first.in_parts)
    expected = torch.autograd.grad(mlp(x).square().sum(), list(mlp.parameters()))
    y = checkpoint(mlp, x, use_reentrant=False)
    found = torch.autograd.grad(y.square().sum(), list(mlp.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert _difference(one, other) < 1e-12


def _half_precision(mesh: ParallelMesh) -> None:
    """The statistics of bfloat16 features are not rounded to bfloat16: only the result is."""
    torch.manual_seed(2)
    norm = nn.LayerNorm(FEATURES, dtype=torch.bfloat16)
    layer = ParallelLayerNorm.from_plain(norm, mesh)
    x = torch.randn(6, FEATURES).bfloat16() + 40
    found = layer(layer.layout.take(x, layer.parts))
    assert found.dtype == torch.bfloat16
    exact = nn.functional.layer_norm(x.double(), (FEATURES,))
    assert _difference(found.double(), layer.layout.take(exact, layer.parts)) < 2**-8


def _autocast(mesh: ParallelMesh) -> None:
    """Under autocast products and exchanges are bfloat16 and the weights' gradients arrive in their own type."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
    mlp = ParallelMLP.from_plain(plain, mesh)
    whole, layout = torch.randn(8, 6), mlp.first.before
    x = layout.take(whole, mlp.first.in_parts).requires_grad_()
    with torch.autocast(whole.device.type, torch.bfloat16), mesh.record() as log:
        expected, found = plain(whole), mlp(x)
    assert found.dtype == torch.bfloat16
    with mesh.record() as backward:
        found.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert backward.sent > 0
    assert _difference(layout.join(found.detach().float(), 8, mlp.second.out_parts), expected.float()) < 0.02
    for one, other in zip((mlp.first, mlp.second), (plain[0], plain[2]), strict=True):
        gradient = ParallelLinear.to_plain(_of_gradients(one)).weight
        assert isinstance(other, nn.Linear)
        assert other.weight.grad is not None
        assert _difference(gradient, other.weight.grad) < 0.02
    with mesh.record() as wide:
        mlp(x)
    assert log.sent == wide.sent / 2


def _of_gradients(layer: ParallelLinear) -> ParallelLinear:
    found = copy.deepcopy(layer)
    for parameter, original in zip(found.parameters(), layer.parameters(), strict=True):
        assert original.grad is not None
        parameter.data = original.grad
    return found


def _summa_overlaps(mesh: ParallelMesh) -> None:
    """The second step's broadcasts are under way when the first step's are waited for."""
    layer = ParallelLinear.from_plain(nn.Linear(4, 4, bias=False, dtype=torch.float64), mesh)
    events: list[str] = []
    start = async_ops.start_broadcast

    def noted(x: Tensor, source: int, group: Group) -> AsyncResult[Tensor]:
        events.append(f"start {source} over {group.name}")
        pending = start(x, source, group)

        def finish() -> Tensor:
            events.append(f"use {source} over {group.name}")
            return pending.wait()

        return AsyncResult(finish)

    async_ops.start_broadcast = noted
    try:
        layer(layer.before.take(torch.ones(4, 4, dtype=torch.float64), layer.in_parts))
    finally:
        async_ops.start_broadcast = start
    for name in ("tp_row", "tp_column"):
        assert events.index(f"start 1 over {name}") < events.index(f"use 0 over {name}")


def _everything() -> list[tuple[str, float, int, list[str]]]:
    found = []
    for plan in PLANS[dist.get_world_size()]:
        worst = _equal_to_plain(plan)
        found.append((f"{plan}", worst, *_undetected_without_a_reduction(plan)))
        if plan.dp == 1:
            mesh = ParallelMesh(plan)
            assert _sent(mesh, 16, 8, 24) == pytest.approx(_textbook(plan, 16, 8, 24))
            _join_undoes_take(mesh)
            _recomputes(mesh)
            _autocast(mesh)
            if plan.tp_mode == "2d":
                _half_precision(mesh)
                _summa_overlaps(mesh)
            if plan.tp_mode == "3d":
                _saved_by_the_cube(mesh)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 8))])
def test_layers_equal_plain_ones_and_need_every_reduction(size: int, backend: str) -> None:
    found = launch(_everything, size, timeout=200, backend=backend)[0]
    assert [reductions for _, _, reductions, _ in found] == REDUCTIONS[size]
    for name, worst, reductions, undetected in found:
        print(f"{name}: worst difference {worst:.1e}, {reductions} reductions, each needed")
        assert not undetected, f"{name}: nothing fails without {undetected}"


def test_layers_that_cannot_be_split_are_refused() -> None:
    mesh = ParallelMesh(ParallelPlan())
    with pytest.raises(ConfigError, match="7 attention heads cannot be split over 8 ranks"):
        Partition.heads(7, 3, 8)
    with pytest.raises(ConfigError, match="expected one over the last dimension"):
        ParallelLayerNorm.from_plain(nn.LayerNorm((3, 4)), mesh)
    with pytest.raises(ConfigError, match="max_norm"):
        ParallelEmbedding.from_plain(nn.Embedding(4, 4, max_norm=1.0), mesh)
    with pytest.raises(ConfigError, match="found Linear, ReLU"):
        ParallelMLP.from_plain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), mesh)
    with pytest.raises(ConfigError, match="no dropout"):
        ParallelAttention.from_plain(nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True), mesh)


def test_one_process_alone_computes_the_plain_layers() -> None:
    mesh, plain = ParallelMesh(ParallelPlan(tp_mode="3d")), make_plain(1)
    _check(_differences(plain, make_parallel(plain, mesh), mesh), "alone")


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1, 1), (3, 0, 2), (4,)])
@pytest.mark.parametrize("affine", [True, False])
def test_uneven_parts_of_features_are_normalised_together(sizes: tuple[int, ...], affine: bool) -> None:
    """Ranks with few features or none have the statistics of all, and gradients of a plain layer."""
    generator = torch.Generator().manual_seed(0)
    x = 3.0 + torch.randn(2, 5, sum(sizes), generator=generator, dtype=torch.float64)
    target = torch.randn(2, 5, sum(sizes), generator=generator, dtype=torch.float64)
    norm = nn.LayerNorm(sum(sizes), 1e-3, elementwise_affine=affine, dtype=torch.float64)
    if affine:
        nn.init.normal_(norm.weight, generator=generator)
        nn.init.normal_(norm.bias, generator=generator)
    whole = x.clone().requires_grad_()
    expected = norm(whole)
    (expected * target).sum().backward()
    line = Line(len(sizes))

    def on_rank(rank: int) -> tuple[Tensor, Tensor]:
        own = ParallelLayerNorm.__new__(ParallelLayerNorm)
        nn.Module.__init__(own)
        own.layout = SimpleNamespace(features=line.group(rank), rows=())  # type: ignore[assignment]
        own.parts, own.eps = SimpleNamespace(sizes=list(sizes)), norm.eps  # type: ignore[assignment]
        parts = [
            None if p is None else nn.Parameter(p.detach().split(sizes)[rank])
            for p in (norm.weight, norm.bias)
        ]
        own.weight, own.bias = parts  # type: ignore[assignment]
        mine = x.split(sizes, -1)[rank].clone().requires_grad_()
        y = own(mine)
        (y * target.split(sizes, -1)[rank]).sum().backward()
        assert mine.grad is not None
        if affine:
            torch.testing.assert_close(own.weight.grad, norm.weight.grad.split(sizes)[rank])  # type: ignore[union-attr]
        return y.detach(), mine.grad

    found = together(len(sizes), on_rank)
    torch.testing.assert_close(
        torch.cat([y for y, _ in found], -1), expected.detach(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(
        torch.cat([gradient for _, gradient in found], -1), whole.grad, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("drops", [True, False])
def test_ranks_draw_their_own_numbers_for_hidden_features_in_training_alone(
    monkeypatch: pytest.MonkeyPatch, training: bool, drops: bool
) -> None:
    mlp = ParallelMLP.__new__(ParallelMLP)
    nn.Module.__init__(mlp)
    activation = nn.Sequential(nn.ReLU(), nn.Dropout(0.5) if drops else nn.Identity())
    mlp.first, mlp.second = (lambda x, sizes: x + 1), (lambda x, sizes: 2 * x)  # type: ignore[assignment]
    mlp.activation, mlp._group = activation, Group(None)
    drawn: list[torch.device] = []

    def own_numbers(group: Group, device: torch.device) -> nullcontext[None]:
        drawn.append(device)
        return nullcontext()

    monkeypatch.setattr(layers, "own_randomness", own_numbers)
    mlp.train(training)
    x = torch.ones(3)
    found = mlp(x)
    assert drawn == ([x.device] if training and drops else [])
    assert set(found.tolist()) <= ({0.0, 8.0} if training and drops else {4.0})
