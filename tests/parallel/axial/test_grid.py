"""Layouts on a grid of ranks, and matrix products of blocks, against whole tensors; the bytes that they send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.errors import ConfigError
from fastfold.kernels.common.layout import padded_width
from fastfold.parallel.axial import matmul
from fastfold.parallel.axial.grid import Grid, choose_contraction, contract, contract_columns, elements_sent
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.drop_reductions import undetected_reductions
from tests.helpers.spawn_ranks import BACKENDS, launch

# Rows of the grids that a number of ranks makes.
GRIDS = {2: (1, 2), 4: (2, 4, 1), 6: (2, 3)}
SUMMA_REDUCTIONS = {2: 4, 4: 8, 6: 16}
# Nothing divides 7, 1 leaves ranks without anything, and shards of 6 over 4 ranks are not halves of its halves.
LENGTHS = ((7, 9), (1, 7), (5, 1), (6, 2))


def _plan(ranks: int, rows: int) -> ParallelPlan:
    return ParallelPlan(dap=ranks, dap_mode="grid", dap_rows=rows)


def _difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return ((found - expected).abs().max() / expected.abs().max()).item() if found.numel() else 0.0


def _random(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _check_layout(
    name: str,
    whole: Tensor,
    take: Callable[[Tensor], Tensor],
    other: Callable[[Tensor], Tensor],
    moved: Tensor,
) -> None:
    """A way between layouts gives the right part, and its backward pass is the adjoint over all ranks.

    Args:
        name: For the message.
        whole: The tensor.
        take: This rank's part of it.
        other: The way.
        moved: This rank's part afterwards.
    """
    own = take(whole).detach().clone().requires_grad_()
    found = other(own)
    assert torch.equal(found, moved), name
    # <way(x), y> = <x, adjoint(y)>, summed over the ranks.
    y = torch.randn(found.shape, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=whole.dtype)
    (gradient,) = torch.autograd.grad(found, own, y)
    products = torch.stack([(found.detach() * y).sum(), (own.detach() * gradient).sum()])
    dist.all_reduce(products)
    assert abs(products[0] - products[1]) < 1e-12 * (1 + products[0].abs()), name


def _layouts(grid: Grid) -> None:
    for view in (grid, grid.transposed):
        for a, b in LENGTHS:
            lengths, x, z = (a, b), _random(2, a, b, 3), _random(3, a, b)
            row, column = view.place(view.whole.rank)
            assert (row, column) == (view.column.rank, view.row.rank)
            _check_layout("gather", x, view.take, lambda t, n=lengths, g=view: g.gather(t, n), x)  # type: ignore[misc]
            by_columns = view.transposed.take(x.transpose(1, 2), (-3, -2)).transpose(1, 2)
            turned = view.take(x, (-2, -3)) if view.rows == view.columns else None
            part = x[:, view.row.shard(a)][:, :, view.column.shard(b)]
            assert turned is None or torch.equal(turned, part)
            assert torch.equal(by_columns, view.take(x))
            _check_layout("turn", x, view.take, lambda t, n=lengths, g=view: g.turn(t, n), part)  # type: ignore[misc]
            rows = x[:, view.row_part(a)]
            _check_layout("rows", x, view.take, lambda t, n=b, g=view: g.to_rows_async(t, n).wait(), rows)  # type: ignore[misc]
            back = view.take(x)
            _check_layout(
                "from rows",
                x,
                lambda t, g=view, n=a: t[:, g.row_part(n)],  # type: ignore[misc]
                lambda t, g=view, n=b, m=back.shape[1]: g.from_rows(t, m, n),  # type: ignore[misc]
                back,
            )
            _check_layout(
                "rows of shards",
                x,
                lambda t, g=view: t[:, g.whole.shard(t.shape[1])],  # type: ignore[misc]
                lambda t, g=view, n=a: g.rows_of_shards_async(t, -3, n).wait(),  # type: ignore[misc]
                x[:, view.own_rows(a)],
            )
            block = view.take(z, (-2, -1))
            channels = z[view.whole.shard(3)]
            _check_layout(
                "to channels",
                z,
                lambda t, g=view: g.take(t, (-2, -1)),  # type: ignore[misc]
                lambda t, g=view, n=lengths: g.to_channels(t, n),  # type: ignore[misc]
                channels,
            )
            _check_layout(
                "from channels",
                z,
                lambda t, g=view: t[g.whole.shard(3)],  # type: ignore[misc]
                lambda t, g=view, n=lengths: g.from_channels(t, n, 3),  # type: ignore[misc]
                block,
            )


def _product_differs(grid: Grid, way: str, n: int) -> float:
    """Two chained products, outgoing and incoming: largest difference of result and gradients."""
    left, right, weights = (_random(2, 3, n, n, seed=seed) for seed in (1, 2, 3))
    leaves = [x.clone().requires_grad_() for x in (left, right)]
    outgoing = torch.einsum("bcik,bcjk->bcij", *leaves)
    expected = torch.einsum("bcki,bckj->bcij", outgoing, leaves[1])
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    own = [grid.take(x, (-2, -1)).clone().requires_grad_() for x in (left, right)]
    product = contract(own[0], own[1], n, grid, way)
    found = contract_columns(product, own[1], n, grid, way)
    gradients = torch.autograd.grad((found * grid.take(weights, (-2, -1))).sum(), own)
    pairs = zip((found.detach(), *gradients), (expected.detach(), *wanted), strict=True)
    return max(_difference(one, grid.take(other, (-2, -1))) for one, other in pairs)


def _everything() -> list[tuple[str, float, int, list[str]]]:
    ranks = dist.get_world_size()
    found = []
    for rows in GRIDS[ranks]:
        plan = _plan(ranks, rows)
        grid = Grid.of(ParallelMesh(plan))
        _layouts(grid)
        for way in ("summa", "channels"):
            worst = max(_product_differs(grid, way, n) for n in (7, 1))
            undetected = undetected_reductions(lambda w=way, g=grid: _product_differs(g, w, 5))  # type: ignore[misc]
            found.append((f"{plan}, {way}", worst, *undetected))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 6))])
def test_products_on_grids_of_every_shape_equal_whole_ones_and_need_every_reduction(
    size: int, backend: str
) -> None:
    for name, worst, reductions, undetected in launch(_everything, size, backend=backend)[0]:
        print(f"{name}: worst difference {worst:.1e}, {reductions} reductions, each needed")
        assert worst < 1e-12
        assert reductions == (0 if "channels" in name else SUMMA_REDUCTIONS[size])
        assert undetected == []


def _padded() -> list[tuple[float, bool]]:
    """As on a GPU: largest difference, and whether anything was padded."""
    found = []
    ranks = dist.get_world_size()
    for rows in GRIDS[ranks]:
        grid = Grid.of(ParallelMesh(_plan(ranks, rows)))
        for way in ("summa", "channels"):
            widths: list[int] = []
            with patch.object(matmul, "_width", lambda x, n, w=widths: w.append(n) or padded_width(n)):  # type: ignore[misc]
                worst = max(_product_differs(grid, way, n) for n in (11, 7, 1))
            found.append((worst, any(n % 8 for n in widths)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_products_of_padded_blocks_are_the_same(size: int) -> None:
    """Blocks, panels and whole matrices of odd sizes get zeros behind them, and no result shows it."""
    for worst, padded in launch(_padded, size)[0]:
        assert worst < 1e-12
        assert padded


class _Multiplied(TorchDispatchMode):
    """Notes the sizes of matrices that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.sizes += [size for x in args for size in x.shape[-2:]]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["summa", "channels"])
@pytest.mark.parametrize(("device", "padded"), [("cpu", False), ("meta", True)])
def test_what_is_multiplied_elsewhere_than_on_a_cpu_has_multiples_of_8(
    way: str, device: str, padded: bool
) -> None:
    """Forward and backward, outgoing and incoming; what the ranks send is the same with and without."""
    n, c = 67, 32
    with _fake_ranks(4):
        mesh = ParallelMesh(_plan(4, 2))
        grid = Grid.of(mesh)
        whole = torch.zeros(c, n, n, device=device)
        left, right = (grid.take(whole, (-2, -1)).clone().requires_grad_() for _ in range(2))
        with _Multiplied() as seen, mesh.record() as log:
            for product in (contract, contract_columns):
                found = product(left, right, n, grid, way)
                assert found.shape == left.shape
                found.sum().backward()
    assert left.grad is not None
    assert left.grad.shape == left.shape
    assert len(seen.sizes) >= 24
    assert all(size % 8 == 0 for size in seen.sizes) == padded
    blocks = elements_sent(n, c, grid)[way]
    assert log.sent / 8 == pytest.approx(blocks, rel=0.05)  # block (0, 0) is the largest


def test_unknown_ways_are_refused() -> None:
    grid = Grid.of(ParallelMesh(ParallelPlan(dap_mode="grid")))
    with pytest.raises(
        ConfigError, match="contraction: expected one of auto, summa, channels, found 'cannon'"
    ):
        contract(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), 2, grid, "cannon")
    with pytest.raises(ConfigError, match="lacks group 'dap_row'"):
        Grid.of(ParallelMesh(ParallelPlan()))


def test_one_rank_alone_is_a_grid() -> None:
    grid = Grid.of(ParallelMesh(ParallelPlan(dap_mode="grid")))
    assert max(_product_differs(grid, way, 4) for way in ("summa", "channels", "auto")) < 1e-12


@contextmanager
def _fake_ranks(ranks: int) -> Iterator[None]:
    """Collectives of this many ranks that run their shapes and send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "rows"), [(4, 2), (16, 4), (64, 8), (32, 4)])
def test_a_product_sends_what_the_formulas_say_and_less_than_a_gather(ranks: int, rows: int) -> None:
    n, c = 64, 32
    with _fake_ranks(ranks):
        mesh = ParallelMesh(_plan(ranks, rows))
        grid = Grid.of(mesh)
        formula = elements_sent(n, c, grid)
        for way in ("summa", "channels"):
            left, right = (
                grid.take(torch.zeros(c, n, n), (-2, -1)).clone().requires_grad_() for _ in range(2)
            )
            with mesh.record() as log:
                contract(left, right, n, grid, way).sum().backward()
            assert log.sent / 4 == pytest.approx(formula[way])
        chosen = choose_contraction("auto", n, c, grid)
    assert chosen == ("summa" if ranks > c else min(formula, key=lambda way: formula[way]))
    # One side gathered by all and its gradient reduce-scattered, as the published form of axial parallelism does.
    gathered = 2 * (ranks - 1) / ranks * n * n * c
    side = ranks**0.5
    assert formula["summa"] < 5.3 * n * n * c / side
    assert formula[chosen] < gathered / (1.3 if ranks == 4 else 2)
