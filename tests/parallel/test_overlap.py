"""Asynchronous collectives overlap with computation: with an artificial network's delays they are not waited for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks.overlap import ArtificialNetwork, count_schedule, measure_overlap
from fastfold.parallel.alphafold import training_block
from fastfold.parallel.comm.collectives import all_to_all_async, gather_async
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.spawn_ranks import launch

LATENCY = 0.1


def _around_computation() -> dict[str, Any]:
    """Hidden shares, forward and backward, of two collectives with and without something to compute meanwhile."""
    group = ParallelMesh(ParallelPlan(dap=2)).group("dap")

    class Slow(torch.autograd.Function):
        """Takes longer than the messages, either way."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(3 * LATENCY)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.sleep(3 * LATENCY)
            return grad.clone()

    def run(network: ArtificialNetwork, beside: bool) -> tuple[float, float]:
        x = torch.ones(4, 4, requires_grad=True)
        with network.connected():
            first, second = gather_async(x, 0, group), all_to_all_async(x, 1, 0, group)
            other = Slow.apply(x) if beside else x
            total = first.wait().sum() + second.wait().sum() + other.sum()
            forward = network.hidden_share
            total.backward()
        assert len(network.messages) == 4
        return forward, network.hidden_share

    found = {
        "beside": run(ArtificialNetwork(LATENCY, wall=True), True),
        "nothing beside": run(ArtificialNetwork(LATENCY, wall=True), False),
        "immediate": run(ArtificialNetwork(LATENCY, wall=True, immediate=True), True),
    }
    return found


def test_a_delay_is_hidden_by_computation_beside_it_and_by_nothing_else() -> None:
    for found in launch(_around_computation, 2):
        assert found["beside"][0] == pytest.approx(1.0)
        assert found["immediate"] == pytest.approx((0.0, 0.0), abs=0.05)
        # Two messages at once: the second's latency overlaps with the first's.
        assert found["nothing beside"][0] < 0.6


def _of_big_messages() -> dict[str, Any]:
    training_block.SMALL_MESSAGE = 0  # so that small ones are sent as big ones are
    return measure_overlap(2, 24, 12, (0.5,), 0.0)


def test_a_sharded_block_hides_some_of_its_communication() -> None:
    found = launch(_of_big_messages, 2)[0]
    network = found["networks"][0]
    # What is computed between the start of a message and the wait for it: the calls themselves.
    assert network["immediate_hidden"] == pytest.approx(0.0, abs=0.05)
    assert 0.1 < network["asynchronous_hidden"] <= 1.0


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("sizes", "alone"), [((96, 64), 0), ((256, 128), 1)])
def test_a_block_starts_few_collectives_and_waits_for_a_third_of_them_at_once(
    ranks: int, sizes: tuple[int, int], alone: int
) -> None:
    """Where shards are equally long; what is big and not needed at once leaves alone and has something beside it."""
    forward, backward = count_schedule(ranks, *sizes)
    assert (forward.collectives, backward.collectives) == (7 + alone, 9 + alone)
    assert (forward.waited_at_once, backward.waited_at_once) == (4, 1)


def test_a_block_on_two_ranks_has_no_more_kernels_than_on_one_but_for_those_of_messages() -> None:
    one, two = (sum(x.kernels for x in count_schedule(ranks, 256, 128)) for ranks in (1, 2))
    assert 150 < two <= one
    assert sum(x.packing for x in count_schedule(1, 256, 128)) == 0
    assert sum(x.packing for x in count_schedule(2, 256, 128)) < 32


def test_many_ranks_reshard_in_few_collectives_and_with_no_more_operators() -> None:
    few, many = count_schedule(16, 64, 64), count_schedule(64, 64, 64)
    for sixteen, more, collectives, dispatches in zip(few, many, (9, 10), (290, 450), strict=True):
        assert sixteen.collectives == more.collectives == collectives
        assert more.dispatches <= sixteen.dispatches <= dispatches
    forward, backward = count_schedule(8, 384, 512)
    assert (forward.collectives, forward.waited_at_once) == (11, 6)
    assert (backward.collectives, backward.waited_at_once) == (12, 6)
