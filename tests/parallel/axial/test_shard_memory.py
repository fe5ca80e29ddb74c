"""What ranks hold for their messages: less in more blocks, as much as is found on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from fastfold.memory import SimulatedDevice
from fastfold.parallel.axial.shards import (
    AxialShards,
    contraction_exchange_bytes,
    gather_bytes,
    reshard_bytes,
)
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh


@pytest.mark.parametrize(("ranks", "n"), [(2, 1600), (3, 1601), (8, 1600), (8, 1601), (16, 1600)])
def test_messages_take_what_is_counted_for_them(ranks: int, n: int) -> None:
    """On rank 0, whose shards are the longest; never more, and not much less."""
    device, own = SimulatedDevice(1 << 40, "meta"), -(-n // ranks)
    with fake_mesh(ParallelPlan(dap=ranks)) as mesh, device.running(), torch.inference_mode():
        shards = AxialShards(mesh.group("dap"))

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device="meta", dtype=torch.bfloat16)

        def taken(run: Callable[[], object]) -> int:
            before = device.peak = device.used
            run()
            return device.peak - before

        left, right, pair, bias = (
            empty(32, n, own),
            empty(32, n, own),
            empty(own, n, 128),
            empty(4, n, own),
        )
        planned = contraction_exchange_bytes(n, 2, channels=32, ranks=ranks)
        result = left.nbytes  # as large as a factor
        # Terms that gloo sends are added here, so they take half as much again as a reduce-scatter of even shards.
        assert 0.65 * planned <= taken(lambda: shards.contract(left, right, -1, n)) - result <= planned
        for blocks in (4, 8, 16):
            where = {"cut": -2, "join": -3, "length": n, "blocks": blocks}
            planned = reshard_bytes(pair.nbytes, blocks)
            assert 0.7 * planned <= taken(partial(shards.reshard_into, pair, pair, **where)) <= 1.01 * planned
        planned = gather_bytes(4, n, own, 2) - bias.nbytes
        assert 0.7 * planned <= taken(lambda: shards.gather(bias, -1, n)) <= 1.01 * planned
