"""Runs a function on n processes that talk over gloo or NCCL, and brings back what they return or what went wrong.

The processes are forked from a server that has imported torch and the packages under test once: starting eight costs a
second, not half a minute.

Over NCCL each process has a GPU of its own, and what the function makes lies there (``OnDevice``): tests that take a
backend (``BACKENDS``) are the same on CPUs and on GPUs. Those of NCCL run by ``make test-nccl``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_device import OnDevice

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.helpers.no_fsync",
        "pytest",
        "hypothesis",
        "torch._dynamo",  # which the first custom operator and the first optimizer bring in
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "fastfold.evoformer.model",
        "fastfold.inference.runner",
        "fastfold.parallel",
        "fastfold.training.run",
    ]
)

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.nccl)]
"""For ``pytest.mark.parametrize("backend", BACKENDS)``."""

# After a rank has failed, the time in which others may report that they had failed before it.
_GRACE_SECONDS = 0.5


T = TypeVar("T")


class RankError(Exception):
    """A rank failed first; the message holds its own traceback, or that it died or hung."""

    def __init__(self, rank: int, story: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} failed:\n{story}")


def _child(
    rank: int,
    size: int,
    store: str,
    timeout: float,
    backend: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: Any,
) -> None:
    gc.freeze()  # what the server imported is no garbage, and copied where a search for garbage touches it
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            device_id=device if device.type == "cuda" else None,
            rank=rank,
            world_size=size,
            store=dist.FileStore(store, size),
            timeout=timedelta(seconds=timeout),
        )
        # Whoever has nothing to say to the others must not leave before they have found it.
        dist.barrier()
        # Plain pickle copies tensors; multiprocessing's would lend memory of a process that is about to end.
        # Not over gloo, where nothing is to be moved: compiled code is another one within such a mode.
        with OnDevice(device) if device.type == "cuda" else nullcontext():
            found = function(*args)
        answer = pickle.dumps(("done", time.time(), found))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("failed", time.time(), traceback.format_exc())))
        # Without tidying up: the others' connections close at once, so they do not wait for this rank.
        os._exit(1)
    pipe.send_bytes(answer)
    dist.destroy_process_group()


def launch(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 100.0, backend: str = "gloo"
) -> list[Any]:
    """Run ``function(*args)`` on ``size`` ranks of a process group; skip the test where they lack GPUs.

    Args:
        function: At the top level of a module, so that a process can import it.
        size: Number of processes.
        args: For the function; pickled.
        timeout: Seconds for everything together.
        backend: ``gloo``, or ``nccl`` with a GPU for each rank.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank raised, died or hung; that of the rank which did so first.
    """
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"NCCL on {size} ranks needs {size} GPUs, and {torch.cuda.device_count()} are here")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes, pipes = [], []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_child, args=(rank, size, store, timeout, backend, theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(processes, pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def on_first_rank(compute: Callable[[], T]) -> T:
    """Return what ``compute`` gives on rank 0, on all ranks: a reference that each would compute for itself.

    Over NCCL each does, because pickled tensors would come back on the GPU of rank 0.
    """
    if dist.get_backend() != "gloo":
        return compute()
    answer: list[Any] = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer)
    return answer[0]


def _collect(processes: list[Any], pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        filled = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        for rank, pipe in [(rank, pipe) for rank, pipe in waiting.items() if pipe in filled]:
            del waiting[rank]
            try:
                state, when, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(1)
                # Nothing of its own to tell: what the others report is the consequence, whenever it is noticed.
                state, when = "failed", 0.0
                value = f"the process died with exit code {processes[rank].exitcode}"
            if state == "done":
                results[rank] = value
                continue
            if not failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            failures[rank] = (when, value)
    if failures or waiting:
        for process in processes:
            process.kill()
    if failures:
        first = min(failures, key=lambda rank: failures[rank][0])
        raise RankError(first, failures[first][1])
    if waiting:
        raise RankError(min(waiting), f"ranks {sorted(waiting)} did not finish in time")
    return [results[rank] for rank in range(len(processes))]
