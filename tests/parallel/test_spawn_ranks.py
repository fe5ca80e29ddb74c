"""The launcher itself: results in rank order, and a failing rank's own story instead of a hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_device import OnDevice
from tests.helpers.spawn_ranks import RankError, launch


def _sum_of_ranks(base: int) -> tuple[int, float]:
    x = torch.tensor(float(base + dist.get_rank()))
    dist.all_reduce(x)
    return dist.get_rank(), x.item()


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the reason of rank 1")
    dist.all_reduce(torch.zeros(1))


def _one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def _one_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_results_come_back_in_rank_order() -> None:
    assert launch(_sum_of_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]


@pytest.mark.parametrize(
    ("function", "story"), [(_one_raises, "the reason of rank 1"), (_one_dies, "exit code 7")]
)
def test_the_failing_ranks_own_error_surfaces_at_once(function: object, story: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=story) as caught:
        launch(function, 2, timeout=60)  # type: ignore[arg-type]
    assert caught.value.rank == 1
    assert time.monotonic() - started < 30


def test_what_a_rank_makes_lies_on_its_device_with_the_numbers_of_the_host() -> None:
    with OnDevice(torch.device("meta")):
        drawn = torch.randn(2, generator=torch.Generator().manual_seed(0), requires_grad=True)
        layer = torch.nn.Linear(2, 3)
        assert {x.device.type for x in (drawn, layer.weight, drawn.detach() * 2)} == {"meta"}
        assert drawn.requires_grad
        assert drawn.is_leaf
        assert torch.zeros(2, device="cpu").device.type == "cpu"
    with OnDevice(torch.device("cpu")):
        assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))


def test_ranks_over_nccl_without_gpus_are_skipped_with_the_reason() -> None:
    size = torch.cuda.device_count() + 1
    with pytest.raises(pytest.skip.Exception, match=f"NCCL on {size} ranks needs {size} GPUs"):
        launch(_sum_of_ranks, size, 10, backend="nccl")


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_after_the_timeout() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] did not finish"):
        launch(_one_hangs, 2, timeout=6)
