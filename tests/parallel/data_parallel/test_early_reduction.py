"""Buckets are reduced while the backward pass runs, in one order on all ranks, to the sums that they had before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, ParallelPlan, parallelize
from fastfold.parallel.data_parallel import buckets
from fastfold.parallel.data_parallel.buckets import Buckets, EarlyReduction
from tests.helpers.spawn_ranks import BACKENDS, launch
from tests.parallel.gpt_case import largest_differences, three_steps

PLANS = {
    2: [
        *[ParallelPlan(dp=2, zero=zero) for zero in range(4)],
        ParallelPlan(sp=2, zero=1),
        ParallelPlan(tp=2),
    ],
    4: [ParallelPlan(dp=2, sp=2, zero=2), ParallelPlan(dp=2, tp=2, zero=1)],
}
LAYERS, WIDTH = 4, 6


def _all_plans(plans: list[ParallelPlan]) -> list[tuple[str, float]]:
    return [(f"{plan}, zero {plan.zero}", three_steps(plan, "adam", overlapped=True)) for plan in plans]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", PLANS)
def test_three_overlapped_steps_equal_those_of_one_process(size: int, backend: str) -> None:
    """With parameters that no rank or one rank alone uses, tied ones, and buckets that end inside of a parameter."""
    for found in launch(_all_plans, size, PLANS[size], timeout=280, backend=backend):
        for plan, worst in found:
            assert worst < 1e-12, f"{plan}: differs by {worst}"


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).double()


def _parallel(plan: ParallelPlan) -> Parallel:
    """A bucket for each layer."""
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", WIDTH * WIDTH + WIDTH):
        return parallelize(_layers(), plan)


def _input(number: int, rank: int) -> Tensor:
    return torch.randn(
        3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank)
    )


def _recomputed(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, nn.Sequential)
    for layer in module:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def _expected(ranks: int, numbers: list[int]) -> dict[str, Tensor]:
    plain = _layers()
    for rank in range(ranks):
        for number in numbers:
            plain(_input(number, rank)).square().sum().backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def _started_early(zero: int) -> tuple[int, int, float, float]:
    """Messages before the first layer's gradients are computed, and after the pass; differences with two passes."""
    parallel = _parallel(ParallelPlan(dp=2, zero=zero))
    rank, module = parallel.mesh.group("dp").rank, parallel.module
    forwards: list[Callable[[nn.Module, Tensor], Tensor]] = [lambda m, x: m(x), _recomputed]
    seen, worst = [], []
    for forward in forwards:
        forward(module, _input(0, rank)).square().sum().backward()
        assert isinstance(module, nn.Sequential)
        counts: list[int] = []
        with parallel.mesh.record() as log:
            x = _input(1, rank).requires_grad_()
            # The first layer's input gets its gradient before its weights do, or right after them.
            x.register_hook(lambda _, log=log, counts=counts: counts.append(len(log.entries)))
            with parallel.overlapped():
                forward(module, x).square().sum().backward()
            counts.append(len(log.entries))
            parallel.reduce_gradients()
        seen.append(counts)
        mine = {name: p.grad for name, p in parallel.gradients.optimized.items() if p.grad is not None}
        whole = parallel.plain(parallel.gradients.whole(copy.copy(mine)))
        worst.append(largest_differences(whole, _expected(2, [0, 1])))
        parallel.gradients.forget_gradients()
    assert seen[0] == seen[1]
    return seen[0][0], seen[0][1], worst[0], worst[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_reductions_start_before_the_backward_pass_ends(zero: int, backend: str) -> None:
    """Also where gradients of a pass before are added to, and where activations are computed again."""
    for during, after, plain, recomputed in launch(_started_early, 2, zero, backend=backend):
        assert LAYERS - 1 <= during <= after == LAYERS
        assert max(plain, recomputed) < 1e-12


def _refused() -> list[str]:
    parallel, found = _parallel(ParallelPlan(dp=2)), []
    module = parallel.module

    def backward() -> None:
        module(_input(0, 0)).square().sum().backward()

    def twice() -> None:
        with parallel.overlapped():
            backward()
            backward()

    def again() -> None:
        for _ in range(2):
            with parallel.overlapped():
                backward()

    def afterwards() -> None:
        with parallel.overlapped():
            backward()
        backward()
        parallel.reduce_gradients()

    for wrong in (twice, again, afterwards):
        try:
            wrong()
        except ConfigError as error:
            found.append(str(error))
        parallel.gradients.forget_gradients()
    dist.barrier()  # a rank that is done closes its connections, which the other may still be making
    return found


def test_passes_that_interfere_are_refused() -> None:
    for twice, again, afterwards in launch(_refused, 2):
        assert "changed after it was sent to other ranks" in twice
        assert "gradients of another backward pass are still being reduced" in again
        assert "changed after it was sent to other ranks" in afterwards


def test_buckets_start_in_order_and_what_is_not_used_goes_last() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    started: list[float] = []

    def start(flat: Tensor) -> Callable[[], Tensor]:
        started.append(float(flat.sum()))
        return lambda: flat

    early = EarlyReduction(parameters, Buckets(parameters, elements=1), start)
    with early.during():
        # The last parameter's bucket is the first; the third is not used, so the second and first wait for it.
        (parameters[3].sum() * 3 + parameters[1].sum() * 5 + parameters[0].sum() * 7).backward()
        assert started == [6.0]
        assert early.started == 1
    buffers, used = early.take()
    assert started == [6.0, 0.0, 10.0, 14.0]
    assert [float(x.sum()) for x in buffers] == started
    assert used == {0, 1, 3}
    assert early.started == 0


def _with_stages() -> str:
    layers = _layers()
    parallel = parallelize(
        layers,
        ParallelPlan(pp=2),
        stages=lambda model, _: [nn.Sequential(*model[:2]), nn.Sequential(*model[2:])],
    )
    with pytest.raises(ConfigError) as caught:
        parallel.overlapped()
    return str(caught.value)


def test_pipelines_are_refused() -> None:
    assert "pp=2 has a backward pass for each micro-batch" in launch(_with_stages, 2)[0]


def test_one_rank_alone_has_nothing_to_overlap() -> None:
    parallel = _parallel(ParallelPlan())
    with parallel.overlapped():
        parallel.module(_input(0, 0)).square().sum().backward()
    parallel.reduce_gradients()
    found = {name: p.grad for name, p in parallel.module.named_parameters() if p.grad is not None}
    assert largest_differences(found, _expected(1, [0])) == 0
