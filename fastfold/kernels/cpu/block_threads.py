"""The blocks of an operator on a CPU, each made by one thread from its beginning to its end.

A block's operators take some 20 to 100 microseconds each. Shared out among all cores, one after the other, cores wait
for each other and read what another core has in its cache. On two cores of an AMD EPYC an Evoformer block of a fold
takes 0.93 of the time in float32, and 0.90 with products in bfloat16 or in 8 bits, if each makes blocks of its own.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.cpu.products import small_products

MAX_LANES = 8
"""Blocks under way at once. Python starts the operators of all of them, one at a time, so that more would wait for it;
of more cores, several work on each block. Chosen without a measurement on more than two cores."""


def for_blocks(
    work: Callable[..., None],
    blocks: Iterable[tuple[Any, ...]],
    scratch: Scratch,
    *,
    lanes: int = MAX_LANES,
) -> None:
    """Call ``work(scratch, *block)`` for each block, on a CPU with several threads for several blocks at once.

    As many threads work as :func:`torch.get_num_threads` says. What a block becomes does not depend on the one that
    makes it; blocks must write to places of their own. Nothing is recorded for gradients.

    Args:
        work: Called with buffers that no other call uses meanwhile.
        blocks: Made one at a time, when a thread is free.
        scratch: Buffers, on the device of the blocks; other threads' buffers are kept in it too.
        lanes: Blocks under way at once, at most.

    Raises:
        Exception: What ``work`` or ``blocks`` raise; no block is begun after that.
    """
    threads = torch.get_num_threads()
    alone = scratch.device.type != "cpu" or _watched() or getattr(_thread, "is_lane", False)
    lanes = 1 if alone else min(lanes, threads)
    blocks = iter(blocks)
    first = list(itertools.islice(blocks, lanes))
    blocks = itertools.chain(first, blocks)
    if lanes == 1 or len(first) < lanes:
        for block in blocks:
            work(scratch, *block)
        return
    queue = _Queue(blocks)
    inference = torch.is_inference_mode_enabled()

    def lane(own: Scratch) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            try:
                for block in queue:
                    work(own, *block)
            finally:
                queue.close()

    # Which library multiplies is a setting of the process, and blocks would change it under each other.
    with small_products():
        pool = _pool(lanes, threads)
        running = [pool.submit(lane, scratch.lane(i)) for i in range(lanes)]
        try:
            for one in running:
                one.result()
        finally:
            queue.close()
            wait(running)


class _Queue:
    """Hands the items of an iterator to whichever thread asks."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            return next(self._items)

    def close(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._items = iter(())


_thread = threading.local()
_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _forget() -> None:
    """In a forked process, which has none of the threads."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)


def _watched() -> bool:
    """Whether operators are counted, faked or compiled in this thread, which would miss those of others."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()


def _pool(lanes: int, threads: int) -> ThreadPoolExecutor:
    """Threads that have an equal part of ``threads`` cores each, for PyTorch's operators."""
    with _lock:
        if (lanes, threads) not in _pools:
            started = threading.Barrier(lanes)

            def start() -> None:
                _thread.is_lane = True
                # A thread takes the process's number when it first asks, and what is set here is its own after that;
                # but it is the process's as well, for threads to come.
                torch.get_num_threads()
                torch.set_num_threads(threads // lanes)

            pool = ThreadPoolExecutor(lanes, thread_name_prefix="fastfold-block", initializer=start)
            wait([pool.submit(started.wait) for _ in range(lanes)])
            torch.set_num_threads(threads)
            _pools[lanes, threads] = pool
        return _pools[lanes, threads]
