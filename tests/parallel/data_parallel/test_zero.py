"""What each ZeRO stage keeps on a rank, and what it sends."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import DTensor

from fastfold.parallel import ParallelPlan
from fastfold.utils.device import AbsentTensor
from tests.helpers.spawn_ranks import launch
from tests.parallel.gpt_case import BUCKET, OPTIMIZERS, make_gpt, make_parallel, make_tokens, parallel_loss


def _elements(tensor: object) -> int:
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()  # type: ignore[attr-defined]


def _kept() -> list[tuple[int, int, int, float]]:
    found = []
    for zero in range(4):
        parallel = make_parallel(ParallelPlan(dp=4, zero=zero))
        optimizer = parallel.optimizer(OPTIMIZERS["adam"])
        with parallel.mesh.record() as log:
            parallel_loss(parallel, make_tokens()).backward()
            parallel.reduce_gradients()
            optimizer.step()
        own = list(parallel.module.parameters())
        states = [optimizer.inner.state[p]["exp_avg"] for p in parallel.gradients.optimized.values()]
        held = own if zero in (0, 3) else [*own, *parallel.gradients.optimized.values()]
        gradients = [p.grad for p in held if not isinstance(p.grad, (AbsentTensor, type(None)))]
        found.append(
            (
                sum(map(_elements, own)),
                sum(map(_elements, gradients)),
                sum(map(_elements, states)),
                log.sent / 8,
            )
        )
    return found


@pytest.fixture(scope="module")
def kept() -> list[list[tuple[int, int, int, float]]]:
    """For each of four ranks and each stage: elements of parameters, gradients and states, and elements sent."""
    return launch(_kept, 4)


def test_each_stage_keeps_a_quarter_of_what_it_shards_on_four_ranks(
    kept: list[list[tuple[int, int, int, float]]],
) -> None:
    total = sum(p.numel() for p in make_gpt().parameters())
    buckets = -(-total // BUCKET) + 1
    for zero, sharded in enumerate([(), (1, 2), (1, 2), (0, 1, 2)]):
        for kind in range(3):
            held = [rank[zero][kind] for rank in kept]
            if kind in sharded:
                assert sum(held) == total
                # FSDP2 cuts whole rows; flat shards differ by the padding alone.
                assert zero == 3 or max(held) <= total / 4 + 4 * buckets
            else:
                assert set(held) == {total}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stages_send_no_more_than_data_parallelism(
    zero: int, kept: list[list[tuple[int, int, int, float]]]
) -> None:
    """All-reduce is 2 (P - 1) / P of the parameters, reduce-scatter and all-gather half of it each."""
    total = sum(p.numel() for p in make_gpt().parameters())
    sent = kept[0][zero][3]
    assert sent == pytest.approx(3 / 4 * total * (2, 2, 2)[zero], rel=0.02)
