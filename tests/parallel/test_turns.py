"""Ranks announce the collective parts of a program, so that none waits long for one that has left."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, parallelize, turns
from fastfold.parallel.comm.async_ops import LostCollectiveError
from fastfold.parallel.turns import take_turn
from tests.helpers.spawn_ranks import launch


def test_one_process_takes_no_turns() -> None:
    take_turn("backward()")
    assert turns._current is None


class _Four(dist.ProcessGroup):
    def size(self) -> int:
        return 4


def test_a_group_of_all_ranks_is_told_by_its_size() -> None:
    one = object.__new__(turns.Turns)
    one._size = 4
    assert one._has_all_ranks(None)
    assert one._has_all_ranks(_Four(0, 4))
    assert not one._has_all_ranks("group")
    one._size = 8
    assert not one._has_all_ranks(_Four(0, 4))


def _leaves(how: str, zero: int) -> tuple[str, float]:
    """Return the message of rank 0, whose loop has one batch more, and its wait in seconds."""
    rank, parallel = dist.get_rank(), parallelize(nn.Linear(3, 2), {"dp": 2, "zero": zero})
    optimizer = parallel.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))

    def step() -> None:
        optimizer.zero_grad()
        parallel(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    start = time.monotonic()
    try:
        if rank == 0:
            step()
        else:
            _end(how, parallel)
    except (ConfigError, LostCollectiveError) as error:
        return str(error), time.monotonic() - start
    except RuntimeError:  # of the group, when rank 0 ends
        assert rank == 1
    return "", 0.0


def _end(how: str, parallel: Parallel) -> None:
    assert turns._current is not None
    if how == "ends":
        turns._current[1]._end()
    elif how == "is killed":
        turns._current[1].close()
    elif how == "barrier":
        dist.barrier()
    else:
        parallel.state_dict()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "zero", "reason"),
    [
        ("ends", 0, "but rank 1 has ended"),
        ("barrier", 1, r"but rank 1 waits in torch\.distributed\.barrier\(\) \(.*test_turns\.py, line \d+\)"),
        ("state_dict", 3, r"but another rank begins state_dict\(\)"),
        ("is killed", 0, "rank 0 of 2 lost another process .* as many batches and backward passes"),
    ],
)
def test_a_rank_with_one_batch_fewer_ends_the_others_within_seconds(how: str, zero: int, reason: str) -> None:
    first, second = launch(_leaves, 2, how, zero)
    message, seconds = first
    assert re.search(reason, message)
    assert ("drop_last=True" in message) == (how != "is killed")
    assert seconds < 8
    if how == "state_dict":
        assert "rank 1 of 2 begins state_dict(), but another rank begins forward()" in second[0]


def _skips_backward() -> tuple[str, float]:
    parallel, start = parallelize(nn.Linear(3, 2), {"dp": 2, "zero": 3}), time.monotonic()
    try:
        for step in range(3):
            loss = parallel(torch.ones(2, 3)).square().mean()
            if step != 1 or dist.get_rank() == 0:
                loss.backward()
    except ConfigError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.long
def test_a_rank_that_skips_a_backward_pass_under_zero_3_is_named_within_seconds() -> None:
    """One rank waits for the next call, another one in the collective that finds that out."""
    for message, seconds in launch(_skips_backward, 2):
        assert re.search("one (calls|goes back through) the module while another (calls|goes back)", message)
        assert seconds < 8


def _apart() -> str:
    try:
        take_turn("a training step" if dist.get_rank() == 0 else "a checkpoint")
    except ConfigError as error:
        return str(error)
    return ""


def test_a_training_step_is_no_checkpoint() -> None:
    """As where a trainer's data end on one rank: every rank says so, and nothing has been sent."""
    first, second = launch(_apart, 2)
    assert "rank 0 of 2 begins a training step, but another rank begins a checkpoint: every rank has" in first
    assert (
        "rank 1 of 2 begins a checkpoint, but another rank begins a training step: every rank has" in second
    )


def _slow() -> float:
    parallel = parallelize(nn.Linear(3, 2), {"dp": 2})
    turns._PATIENCE = 0.5
    total = 0.0
    for number in range(3):
        if number == 1 and dist.get_rank() == 1:
            time.sleep(2)
        loss = parallel(torch.ones(2, 3)).square().mean()
        loss.backward()
        parallel.zero_grad()
        total += float(loss)
    return total


@pytest.mark.long
def test_a_slow_rank_is_waited_for() -> None:
    """Longer than the patience too: then the collective waits, as it does without turns."""
    first, second = launch(_slow, 2)
    assert first == second


def _one_after_the_other() -> int:
    for _ in range(20):
        take_turn("backward()")
        take_turn("state_dict()")
    dist.barrier()  # the last rank of a turn deletes the records of the turn before
    assert turns._current is not None
    return sum(turns._current[1]._store.check([f"{n}/arrived"]) for n in range(1, 41))


def test_turns_leave_one_record() -> None:
    """Earlier ones are deleted from the store."""
    assert launch(_one_after_the_other, 3) == [1] * 3
