"""State of which no rank ever holds the whole, written and read by ``torch.distributed.checkpoint`` under any plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from fastfold.parallel import Parallel, ParallelOptimizer, ParallelPlan
from fastfold.parallel.data_parallel import full_state
from fastfold.parallel.data_parallel.full_state import FullStateDict
from fastfold.parallel.data_parallel.sharded_norm import local, whole
from tests.helpers.spawn_ranks import launch
from tests.parallel.gpt_case import (
    OPTIMIZERS,
    flat,
    largest_differences,
    make_parallel,
    make_tokens,
    parallel_loss,
)

LEAST = 30
"""Elements of what is cut here."""

TWO_RANKS = {"zero 1": ParallelPlan(dp=2, zero=1), "tp": ParallelPlan(tp=2)}

FOUR_RANKS = {
    "zero 2 x tp": ParallelPlan(dp=2, tp=2, zero=2),
    "zero 3": ParallelPlan(dp=4, zero=3),
    "zero 3 x tp": ParallelPlan(dp=2, tp=2, zero=3),
    "2d": ParallelPlan(tp=4, tp_mode="2d"),
    "pp": ParallelPlan(pp=2, dp=2, zero=1),
    "pp x tp": ParallelPlan(pp=2, tp=2),
}


class _Watched:
    """Sees to it that plain tensors are let go before the next are made."""

    def __init__(self) -> None:
        self.alive: list[TensorWeakRef] = []
        self.most = 0

    def plain(self, original: Any, state: FullStateDict, values: dict[str, Tensor], **options: bool) -> Any:
        given = {x.data_ptr() for x in values.values()}
        assert not any(kept() is not None for kept in self.alive)
        found = original(state, values, **options)
        made = [x for x in found.values() if x.numel() >= LEAST and x.data_ptr() not in given]
        self.alive = [TensorWeakRef(x) for x in made]
        self.most = max(self.most, sum(x.numel() for x in found.values()))
        return found


def _trained(plan: ParallelPlan, steps: int) -> tuple[Parallel, ParallelOptimizer]:
    parallel = make_parallel(plan, tied=False)
    optimizer = parallel.optimizer(OPTIMIZERS["adam"])
    optimizer.initialize()
    for step in range(steps):
        if plan.pp == 1:
            parallel_loss(parallel, make_tokens(step)).backward()
        else:  # any gradient will do
            sum(p.square().sum() for p in parallel.module.parameters()).backward()  # type: ignore[union-attr]
        parallel.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return parallel, optimizer


def _tensors(parallel: Parallel, optimizer: ParallelOptimizer) -> dict[str, Tensor]:
    return parallel.sharded_state_dict() | flat(optimizer.sharded_state_dict())


def _check_slices(plan: ParallelPlan, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Of large tensors a rank has its share, and nothing behind it."""
    ranks = plan.ranks // plan.pp
    assert found
    assert set(found) <= set(expected)
    counts = torch.tensor([float(name in found) for name in expected])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    assert counts.all()  # of a pipeline every stage has its own
    assert (len(found) < len(expected)) == (plan.pp > 1)
    for name, x in found.items():
        if x.numel() >= LEAST:
            assert isinstance(x, DTensor), name
            own = local(x)
            assert own.numel() <= -(-max(x.shape) // ranks) * x.numel() // max(x.shape)
            assert own.untyped_storage().nbytes() == own.numel() * own.element_size()
        assert torch.equal(whole(x), expected[name]), name


def _state(plan: ParallelPlan, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's slices of a trained model, while they are made watched; fills ``expected`` with all of it."""
    parallel, optimizer = _trained(plan, 2)
    expected |= parallel.state_dict() | flat(optimizer.state_dict())
    watched, original = _Watched(), FullStateDict.plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullStateDict, "plain", lambda *args, **more: watched.plain(original, *args, **more))
        found = _tensors(parallel, optimizer)
    # One cut layer at a time, or one tensor.
    assert watched.most < sum(x.numel() for x in parallel.state_dict().values()) / 3
    _check_rank_zero(parallel)
    return found


def _gone(references: list[TensorWeakRef]) -> None:
    """A thread of the process group may let its last message go a moment late."""
    end = time.monotonic() + 10
    while any(kept() is not None for kept in references):
        assert time.monotonic() < end, "a tensor that was made before is kept"
        time.sleep(0.001)


def _check_rank_zero(parallel: Parallel) -> None:
    """The whole model on rank 0 alone; no rank keeps what it was made of."""
    expected = parallel.state_dict()
    alive: list[TensorWeakRef] = []
    original = FullStateDict.one_by_one

    def watched(state: FullStateDict, own: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        parts = {local(x).data_ptr() for x in own.values()}
        tensors = original(state, own)
        while True:
            _gone(alive)
            each = next(tensors, None)
            if each is None:
                return
            if each[1].data_ptr() not in parts:
                alive.append(TensorWeakRef(each[1]))
            yield each
            del each

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullStateDict, "one_by_one", watched)
        found = parallel.state_dict(rank0_only=True)
    assert len(alive) > 0
    if dist.get_rank():
        assert found == {}
    else:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        own = {x.data_ptr() for x in parallel.module.state_dict().values() if not isinstance(x, DTensor)}
        assert not own & {x.data_ptr() for x in found.values()}


def _resume(plan: ParallelPlan, folder: str, expected: dict[str, Tensor]) -> float:
    """Largest difference from what was saved."""
    parallel, optimizer = _trained(plan, 0)
    model, states = parallel.sharded_state_dict(), optimizer.sharded_state_dict()
    dcp.load(model | flat(states), checkpoint_id=folder)  # the tensors are filled
    parallel.load_state_dict(model)
    optimizer.load_state_dict(states)
    return largest_differences(parallel.state_dict() | flat(optimizer.state_dict()), expected)


def _save(plans: dict[str, ParallelPlan], folder: str) -> None:
    full_state._LEAST = LEAST  # type: ignore[misc]
    readers = [*plans.values()]
    for plan, reader in zip(plans.values(), [*readers[1:], readers[0]], strict=True):
        expected: dict[str, Tensor] = {}
        found = _state(plan, expected)
        _check_slices(plan, found, expected)
        dcp.save(found, checkpoint_id=f"{folder}/{plan}")
        assert _resume(reader, f"{folder}/{plan}", expected) == 0, f"{plan} read by {reader}"


@pytest.mark.parametrize("plans", [TWO_RANKS, pytest.param(FOUR_RANKS, marks=pytest.mark.slow)])
def test_no_rank_holds_the_model_and_every_plan_reads_what_every_other_wrote(
    plans: dict[str, ParallelPlan], tmp_path: Path
) -> None:
    launch(_save, next(iter(plans.values())).ranks, plans, str(tmp_path), timeout=300)
