"""Processes find each other, or say why not."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastfold.errors import ConfigError, FastFoldError, LostProcessError
from fastfold.parallel import ParallelPlan, distributed, init_distributed
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import all_reduce
from fastfold.parallel.distributed import PartedError
from tests.helpers.forked import Forked, rank_environments
from tests.helpers.on_device import OnDevice
from tests.helpers.spawn_ranks import BACKENDS
from tests.parallel.gpt_case import OPTIMIZERS, make_parallel, make_tokens, parallel_loss

CPU = torch.device("cpu")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """This is the first of two processes; how long it would have paused between attempts."""
    found: list[float] = []
    monkeypatch.setattr(distributed.time, "sleep", found.append)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return found


def test_a_port_that_another_program_has_is_named(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(ConfigError, match=rf"rank 0 of 2 did not find .* at 127\.0\.0\.1:{port} .*in use"),
            init_distributed(ParallelPlan(dp=2), CPU),
        ):
            pass
    assert pauses == [1.0, 2.0, 4.0]
    assert not dist.is_initialized()


def test_a_connection_that_fails_at_first_is_tried_again_with_the_time_that_was_asked_for(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Met(Exception):
        """The processes have found each other."""

    timeouts: list[timedelta] = []

    def meet(where: str, **options: Any) -> None:
        timeouts.append(options["timeout"])
        if len(timeouts) < 3:
            raise dist.DistNetworkError("connection refused")
        raise Met

    monkeypatch.setattr(dist, "rendezvous", meet)
    with pytest.raises(Met), init_distributed(ParallelPlan(dp=2), CPU, timeout=timedelta(minutes=3)):
        pass
    assert (pauses, timeouts) == ([1.0, 2.0], [timedelta(minutes=3)] * 3)


WAIT_SECONDS = 20.0


def _train_until_killed(backend: str, zero: int) -> int:
    """Rank 1 is killed in its third step; the others train on until they notice, and say it as a command does."""
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    plan = ParallelPlan(dp=int(os.environ["WORLD_SIZE"]), zero=zero)
    try:
        with (
            init_distributed(plan, device, timeout=timedelta(seconds=WAIT_SECONDS)) as context,
            OnDevice(context.device),
        ):
            parallel = make_parallel(plan)
            optimizer = parallel.optimizer(OPTIMIZERS["adam"])
            for number in itertools.count():
                if number == 2 and context.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                parallel_loss(parallel, make_tokens(number)).backward()
                parallel.reduce_gradients()
                optimizer.step()
                optimizer.zero_grad()
                context.gather(number)
    except FastFoldError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zero", [0, 2])
def test_when_a_rank_is_killed_the_others_end_in_time_with_one_error(backend: str, zero: int) -> None:
    size = 2 if backend == "nccl" else 3
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"NCCL on {size} ranks needs {size} GPUs, and {torch.cuda.device_count()} are here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = time.monotonic()
    ranks = [
        Forked(_train_until_killed, backend, zero, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert time.monotonic() - started < WAIT_SECONDS + 60
    assert ranks[1].returncode == -signal.SIGKILL
    for number in (rank for rank in range(size) if rank != 1):
        assert ranks[number].returncode not in (0, None), said[number]
        if backend == "gloo":  # NCCL's own thread may end a process whose GPU waits, and says so itself
            lines = [line for line in said[number].splitlines() if not line.startswith("[")]
            assert len(lines) == 1, said[number]
            assert f"rank {number} of {size} lost another process" in lines[0]


def _meets_again() -> int:
    with init_distributed(ParallelPlan(dap=3), CPU) as context:
        group, meeting = context.mesh.group("dap"), context.meeting
        assert meeting is not None
        for turn in range(2):
            assert meeting.why(timedelta(0)) is None  # what was said before is over
            context.barrier()
            if context.rank == turn:
                meeting.say_why(f"turn {turn}")
            else:
                with pytest.raises(RuntimeError):
                    all_reduce(torch.ones(2), group)
                assert meeting.why() == f"turn {turn}"
            context.regroup()
            assert context.mesh.group("dap") is group
            assert all_reduce(torch.full((2,), context.rank + 1.0), group).tolist() == [6.0, 6.0]
            assert context.gather(context.rank) == [0, 1, 2]
    return 0


def test_processes_that_part_within_a_collective_meet_again_and_go_on_with_their_groups() -> None:
    started = [Forked(_meets_again, env=environment) for environment in rank_environments(3)]
    said = [process.communicate(60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said


def _freed(backend: str) -> int:
    """Rank 0 parts; the others wait for a GPU (of which there is a stand-in over gloo) until that is ended for them."""
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    with init_distributed(ParallelPlan(dap=int(os.environ["WORLD_SIZE"])), device) as context:
        group, meeting, freed = context.mesh.group("dap"), context.meeting, threading.Event()
        assert meeting is not None
        if backend == "gloo":
            meeting.abort = freed.set  # type: ignore[method-assign]
        with meeting.ended_by("memory"):  # nobody parts
            context.barrier()
        if context.rank == 0:
            time.sleep(1.0)
            meeting.say_why("memory")
        else:

            def wait_for_rank_zero() -> None:
                if backend == "gloo":
                    assert freed.wait(WAIT_SECONDS)
                else:
                    all_reduce(torch.ones(2, device=context.device), group)
                    torch.cuda.synchronize()

            begun = time.monotonic()
            with pytest.raises(RuntimeError) as raised, meeting.ended_by("memory"):
                wait_for_rank_zero()
            if backend == "gloo":  # whose stand-in raises nothing
                assert raised.type is PartedError
            assert time.monotonic() - begun < WAIT_SECONDS
            assert meeting.why() == "memory"
        context.regroup()
        ones = torch.full((2,), context.rank + 1.0, device=context.device)
        assert all_reduce(ones, group).sum().item() == context.size * (context.size + 1)
        with meeting.ended_by("memory"):  # what was said before is over
            assert context.gather(context.rank) == list(range(context.size))
    return 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_waits_for_a_process_that_parts_waits_no_longer_and_meets_it_again(backend: str) -> None:
    size = 2 if backend == "nccl" else 3
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"NCCL on {size} ranks needs {size} GPUs, and {torch.cuda.device_count()} are here")
    started = [Forked(_freed, backend, env=environment) for environment in rank_environments(size)]
    said = [process.communicate(100)[1] for process in started]
    assert [process.returncode for process in started] == [0] * size, said


def _parts_for_another_reason() -> int:
    with init_distributed(ParallelPlan(dap=2), CPU) as context:
        meeting = context.meeting
        assert meeting is not None
        ended: list[None] = []
        meeting.abort = lambda: ended.append(None)  # type: ignore[method-assign]
        with meeting.ended_by("memory"):
            if context.rank == 0:
                meeting.say_why("something else")
            time.sleep(3 * distributed._LOOK_SECONDS)
        assert not ended
    return 0


def test_who_waits_is_freed_for_one_reason_alone() -> None:
    started = [Forked(_parts_for_another_reason, env=environment) for environment in rank_environments(2)]
    said = [process.communicate(60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said


@pytest.mark.parametrize(
    ("words", "is_lost"),
    [
        ("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:4242", True),
        ("[gloo/transport/tcp/unbound_buffer.cc] Timed out waiting 1800000ms for recv operation", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_collective_without_another_rank_names_this_one_and_the_remedy(words: str, is_lost: bool) -> None:
    def fail() -> None:
        raise RuntimeError(words)

    work: Any = SimpleNamespace(wait=fail)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LostProcessError if is_lost else RuntimeError) as caught:
            AsyncResult(lambda: None, work).wait()
    finally:
        dist.destroy_process_group()
    text = str(caught.value)
    assert text.startswith("rank 0 of 1 lost another process in a collective ([gloo") == is_lost
    assert text.endswith("give all ranks as many batches and backward passes") == is_lost
