"""Kinds of parallelism together: one training step equals that of one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from unittest import mock

import pytest
import torch

from fastfold.parallel import ParallelPlan, alphafold, parallelize
from fastfold.parallel.data_parallel import buckets
from tests.helpers.spawn_ranks import launch, on_first_rank
from tests.parallel.alphafold.axial_cases import difference
from tests.parallel.alphafold.axial_networks import (
    BLIND,
    gradient_differences,
    monomer_sample,
    plain_steps,
    small_network,
    train_step,
    worst_of,
)
from tests.parallel.gpt_case import OPTIMIZERS, three_steps


def _network_step(plan: ParallelPlan, optimizer: str) -> tuple[float, str]:
    """The whole AlphaFold loss of two proteins of different lengths, recycled once, with dropout.

    Both optimizers step from the gradients of the ranks, which are compared before: where a gradient is as small as the
    1e-6 that LAMB adds to it, its rounding is a million times larger in the parameter.
    """
    model = small_network("synthetic_monomer")
    samples = [monomer_sample(13, 4, 3), monomer_sample(9, 5, 6, first=8)][: plan.dp]
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 20_000):
        parallel = parallelize(copy.deepcopy(model), plan, dap=alphafold.shard)
    network = parallel.module
    own = parallel.rows(len(samples)).start

    _, mean_gradients = on_first_rank(lambda: plain_steps(model, samples, 0))
    for parameter, gradient in zip(model.parameters(), mean_gradients, strict=True):
        # What no loss reaches has no gradient; sums over ranks make zeros of it.
        parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
    train_step(network, samples[own], own)  # type: ignore[arg-type]
    share = parallel.loss_share(1)
    for parameter in parallel.gradients.parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(share)
    parallel.reduce_gradients()

    mine = {name: p.grad for name, p in parallel.gradients.optimized.items() if p.grad is not None}
    whole = parallel.plain(parallel.gradients.whole(mine))
    found = copy.deepcopy(model)
    for name, parameter in found.named_parameters():
        parameter.grad = whole[name]
    worst = dict(gradient_differences(found, model))

    plain = OPTIMIZERS[optimizer](dict(found.named_parameters()))
    ours = parallel.optimizer(OPTIMIZERS[optimizer])
    plain.step()
    ours.step()
    state = parallel.state_dict()
    # A step that is scaled by its own length makes a step of rounding, where the gradient is nothing else.
    worst |= {
        name: difference(state[name], p.detach(), least=1e-9)
        for name, p in found.state_dict().items()
        if not name.endswith(BLIND)
    }
    return worst_of(worst)


def _network_steps(plans: Mapping[str, ParallelPlan]) -> dict[str, tuple[float, str]]:
    return {name: _network_step(plan, name) for name, plan in plans.items()}


@pytest.mark.parametrize(
    "plans",
    [
        {"lamb": ParallelPlan(dp=2, dap=2, zero=1)},
        pytest.param(
            {
                "sgd": ParallelPlan(dp=2, dap=2, zero=2),
                "lars": ParallelPlan(dap=4, dap_mode="grid", zero=1),
                "lamb": ParallelPlan(dap=4, zero=3),
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dp x dap x zero 1", "others"],
)
def test_network_under_data_and_axial_parallelism_with_sharded_states(
    plans: Mapping[str, ParallelPlan],
) -> None:
    """dp 2 x dap 2 x zero 1: gradients and, after a step whose length depends on norms, parameters."""
    for found in launch(_network_steps, 4, plans, timeout=280):
        for name, (worst, what) in found.items():
            assert worst < 1e-12, f"{plans[name]}: {what} differs by {worst}"


def _gpt_steps(plans: list[ParallelPlan]) -> list[float]:
    return [three_steps(plan, "lamb") for plan in plans]


def test_gpt_under_data_parallelism_with_tensor_and_with_ring_sequence_parallelism() -> None:
    """dp 2 x tp 2, and ring sp 2 x dp 2."""
    for found in launch(_gpt_steps, 4, [ParallelPlan(dp=2, tp=2), ParallelPlan(dp=2, sp=2)]):
        assert max(found) < 1e-12


@pytest.mark.long
def test_gpt_under_sequence_parallelism_with_sharded_parameters_and_with_tensor_parallelism() -> None:
    """Messages of the other kinds are no operators of the module, and are not compared."""
    for found in launch(_gpt_steps, 2, [ParallelPlan(sp=2, zero=3)]):
        assert max(found) < 1e-12
    for found in launch(_gpt_steps, 4, [ParallelPlan(sp=2, tp=2)]):
        assert max(found) < 1e-12
