"""Bytes that each tensor parallel layer sends at 64 ranks, against the formulas of its papers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.tensor_parallel import (
    ParallelAttention,
    ParallelEmbedding,
    ParallelLayerNorm,
    ParallelLinear,
    ParallelMLP,
    Partition,
    layouts,
)
from fastfold.utils.module_structure import tensors_in

RANKS = 64
PLANS = [
    ParallelPlan(tp=RANKS),
    ParallelPlan(tp=RANKS, tp_mode="2d"),
    ParallelPlan(tp=RANKS, tp_mode="2.5d", tp_depth=4),
    ParallelPlan(tp=RANKS, tp_mode="3d"),
]


@pytest.fixture(autouse=True)
def _fake_ranks() -> Iterator[None]:
    """Collectives of this many ranks that run their shapes and send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def _sum(size: int, elements: float) -> float:
    """An all-reduce of ``elements`` elements."""
    return 2 * (size - 1) / size * elements


def _linear(plan: ParallelPlan, m: int, n: int, k: int, second: bool = False) -> float:
    """Forward and backward of a product of m rows with n features and k outputs, without bias."""
    if plan.tp_mode == "1d":
        return _sum(plan.tp, m * k if second else m * n)
    if plan.tp_mode == "3d":
        side = plan.tp_grid[0]
        return (side - 1) / side**3 * (3 * m * n + 3 * n * k + 2 * m * k)
    depth, side, _ = plan.tp_grid
    return 3 * (side - 1) / side * (m * n / (side * depth) + n * k / side) + _sum(depth, n * k / side**2)


def _vector(plan: ParallelPlan, n: int) -> float:
    """The gradient of a bias or scale of n features."""
    if plan.tp_mode == "1d":
        return 0
    if plan.tp_mode == "3d":
        return 2 * _sum(plan.tp_grid[0], n / plan.tp_grid[0])
    depth, side, _ = plan.tp_grid
    return _sum(depth, n / side) + _sum(side, n / side)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_layer_sends_what_its_formula_says(plan: ParallelPlan) -> None:
    batch, length, n, hidden, vocabulary = 128, 2, 64, 192, 320
    m, side = batch * length, plan.tp_grid[-1]
    mesh = ParallelMesh(plan)
    layout = layouts(mesh)[0]
    ids = layout.take(torch.zeros(batch, length, dtype=torch.int64))
    parts = Partition.even(n, layout.features.size)
    x = layout.take(torch.randn(batch, length, n), parts).requires_grad_()

    def sent(layer: nn.Module, argument: torch.Tensor, **more: bool) -> float:
        with mesh.record() as log:
            next(tensors_in(layer(argument, **more))).sum().backward()
        return log.sent / 4

    attention = nn.MultiheadAttention(n, 64, batch_first=True)
    mlp = nn.Sequential(nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, n))
    assert sent(ParallelMLP.from_plain(mlp, mesh), x) == pytest.approx(
        _linear(plan, m, n, hidden)
        + _linear(plan, m, hidden, n, second=True)
        + _vector(plan, hidden)
        + _vector(plan, n)
    )
    assert sent(ParallelAttention.from_plain(attention, mesh), x, need_weights=False) == pytest.approx(
        _linear(plan, m, n, 3 * n)
        + _linear(plan, m, n, n, second=True)
        + _vector(plan, 3 * n)
        + _vector(plan, n)
    )

    # Two numbers of each row and rank, gathered forward and reduce-scattered backward.
    rows = x.shape[0] * length
    statistics = 0 if plan.tp_mode == "1d" else 2 * (side - 1) * 2 * rows
    assert sent(ParallelLayerNorm.from_plain(nn.LayerNorm(n), mesh), x) == pytest.approx(
        statistics + 2 * _vector(plan, n)
    )

    embedding = ParallelEmbedding.from_plain(nn.Embedding(vocabulary, n), mesh)
    if plan.tp_mode == "1d":
        expected = _sum(plan.tp, m * n)
    else:
        # The table's columns of this rank, gathered and its gradient reduce-scattered; then summed over the other rows.
        others = plan.tp_grid[0]
        expected = 2 * (side - 1) / side * vocabulary * n / side + _sum(others, vocabulary * n / side**2)
    assert sent(embedding, ids) == pytest.approx(expected)


def test_volume_falls_with_the_dimensions_as_the_textbook_says() -> None:
    # A large batch: what is sent is dominated by activations, as the textbook's exponents assume.
    batch, n, totals = 65536, 64, []
    for plan in PLANS:
        mesh = ParallelMesh(plan)
        layer = ParallelLinear.from_plain(nn.Linear(n, n, bias=False), mesh)
        x = layer.before.take(torch.zeros(batch, n), layer.in_parts).requires_grad_()
        with mesh.record() as log:
            layer(x).sum().backward()
        assert log.sent / 4 == pytest.approx(_linear(plan, batch, n, n))
        totals.append(log.sent / 4 / (batch * n))
    print("elements sent per activation element at 64 ranks:", [f"{total:.3f}" for total in totals])
    # Before the powers: 2 of 1d's all-reduce; 3 broadcasts or sums of blocks; 3 times the input's size and 2 times the
    # output's.
    expected = [2, 3 / RANKS**0.5, 3 / (4 * RANKS) ** 0.5, 5 / RANKS ** (2 / 3)]
    for total, textbook in zip(totals, expected, strict=True):
        assert 0.7 * textbook < total < 1.1 * textbook
