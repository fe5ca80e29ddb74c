"""Blocks of an operator on a CPU, each computed by one thread from beginning to end.

An operator of a block takes 20 to 100 microseconds. If all cores share each of them, cores wait for each other and
read data from another core's cache. One block per thread avoids both (``benchmarks/results/choices.md`` has times).
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fastfold.kernels.common.backend import is_traced
from fastfold.kernels.common.scratch import (
    BLOCK_ELEMENTS,
    ONE_BLOCK,
    Scratch,
    block_positions,
    position_blocks,
)

T = TypeVar("T")

MAX_THREADS = 8
"""Maximum number of concurrent blocks. Python starts the operators of all of them one at a time, so more would wait for
it; on more cores, several cores work on each block. Not measured on more than two cores."""

_OWN_TOTALS = 3 * BLOCK_ELEMENTS  #: Maximum elements of totals that each thread has of its own


def forward_positions(channels: int, positions: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the number of positions per block of a forward pass, which sums nothing over positions.

    Narrow channels get blocks of up to 4,096 positions, so that fewer operators are started, and at least four blocks
    for each thread. ``channels`` are those of the widest buffer, ``positions`` those of all blocks. Fast products of
    ``dtype`` bfloat16 get one block of up to 4 ``BLOCK_ELEMENTS``, or blocks of 2,048 positions at least.
    """
    threads = min(MAX_THREADS, torch.get_num_threads())
    largest = min(4096, BLOCK_ELEMENTS // 4 // channels)
    if dtype == torch.bfloat16:
        if positions * channels <= 4 * BLOCK_ELEMENTS:
            return positions
        largest = max(2048, largest)
    return max(block_positions(channels), min(largest, positions // (4 * threads)))


def threads_of(positions: int, dtype: torch.dtype) -> int:
    """Return the maximum number of concurrent blocks of an operator on ``positions`` in ``dtype``."""
    return 1 if dtype == torch.bfloat16 and positions <= ONE_BLOCK else MAX_THREADS


def for_blocks(
    work: Callable[..., None],
    blocks: Iterable[tuple[Any, ...]],
    scratch: Scratch,
    *,
    threads: int = MAX_THREADS,
) -> None:
    """Call ``work(scratch, *block)`` for each block; on a CPU with several threads, for several blocks at once.

    The number of threads is :func:`torch.get_num_threads`, and at most ``threads``. Each has its own buffers, which are
    kept in ``scratch`` too. The result of a block does not depend on its thread; blocks must write to separate places.
    No gradients are recorded. After an exception of ``work`` or ``blocks``, which is raised, no block is started.
    """
    blocks = iter(blocks)
    first = list(itertools.islice(blocks, 2))
    if len(first) == 1:
        work(scratch, *first[0])
        return
    threads = _threads(scratch, threads)
    first.extend(itertools.islice(blocks, max(0, threads - 2)))
    blocks = itertools.chain(first, blocks)
    if threads == 1 or len(first) < threads:
        for block in blocks:
            work(scratch, *block)
        return
    _run([functools.partial(work, scratch.of_thread(i)) for i in range(threads)], [_Queue(blocks)] * threads)


def for_positions(
    work: Callable[..., None], channels: int, scratch: Scratch, *tensors: Tensor, size: int | None = None
) -> None:
    """Call ``work(scratch, positions, *parts)`` for blocks of a forward pass; see :func:`for_blocks`.

    ``positions`` is the slice of a block ``[n, c_t]`` of the tensors ``[*, c_t]``, whose leading axes are equal, in
    row-major order. Its ``size`` is by default that of :func:`forward_positions` for the dtype of ``scratch``.
    """
    if size is None:
        size, count = block_positions(channels), tensors[0].shape[:-1].numel()
        if count > size:
            size = forward_positions(channels, count, scratch.dtype)
    blocks: list[tuple[Any, ...]] = []
    start = 0
    for parts in position_blocks(size, *tensors):
        stop = start + parts[0].shape[0]
        blocks.append((slice(start, stop), *parts))
        start = stop
    if len(blocks) == 1:  # without the preparations for several
        work(scratch, *blocks[0])
    else:
        for_blocks(work, blocks, scratch)


def sum_blocks(
    work: Callable[..., None],
    blocks: Iterable[tuple[Any, ...]],
    scratch: Scratch,
    totals: Any,
    *,
    threads: int = MAX_THREADS,
) -> None:
    """Call ``work(scratch, totals, *block)`` for each block, as :func:`for_blocks` does, to add to ``totals``.

    Totals are tensors in lists and tuples of any depth. Each thread adds to its own, which are summed at the end; all
    threads share each block if these would be large. The number of threads alone decides which thread computes a block,
    so sums are the same bits every time.
    """
    size = sum(x.numel() for x in tree_leaves(totals) if isinstance(x, Tensor))
    threads = _threads(scratch, threads) if size <= _OWN_TOTALS else 1
    blocks = list(blocks)
    if threads == 1 or len(blocks) < threads:
        for block in blocks:
            work(scratch, totals, *block)
        return
    own = [totals, *(tree_map_only(Tensor, torch.zeros_like, totals) for _ in range(1, threads))]
    _run(
        [functools.partial(work, scratch.of_thread(i), own[i]) for i in range(threads)],
        [_Queue(iter(blocks[i::threads])) for i in range(threads)],
    )
    for total, *parts in zip(*map(tree_leaves, own), strict=True):
        for part in parts:
            if isinstance(total, Tensor):
                total += part


def on_one_core(work: Callable[[], T]) -> T:
    """Return ``work()``, whose operators on the CPU use one core each, without recording gradients.

    Cores that share an operator of a few thousand numbers wait for each other longer than it takes.
    """
    if torch.get_num_threads() == 1 or is_traced() or _thread.is_block_thread:
        return work()
    inference = torch.is_inference_mode_enabled()

    def alone() -> T:
        with torch.inference_mode(inference), torch.no_grad():
            return work()

    with _started_pool(1, 1) as pool:  # not a shared pool, because works may wait for each other
        return pool.submit(copy_context().run, alone).result()


def _threads(scratch: Scratch, limit: int) -> int:
    """Return the number of blocks to compute at once."""
    threads = min(limit, torch.get_num_threads())
    if threads == 1 or scratch.device.type != "cpu" or is_traced() or _thread.is_block_thread:
        return 1
    return threads


def _run(works: Sequence[Callable[..., None]], queues: Sequence[_Queue]) -> None:
    """Call each function on a thread of its own for the blocks of its queue."""
    inference = torch.is_inference_mode_enabled()

    def run_queue(work: Callable[..., None], queue: _Queue) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            try:
                for block in queue:
                    work(*block)
            except BaseException:
                close()
                raise

    def close() -> None:
        for queue in queues:
            queue.close()

    pool = _pools.get(len(works), torch.get_num_threads())
    # Settings of the caller, as the library of products, are in its context.
    pairs = zip(works, queues, strict=True)
    running = [pool.submit(copy_context().run, run_queue, work, queue) for work, queue in pairs]
    try:
        for one in running:
            one.result()
    finally:
        close()
        wait(running)


class _Queue:
    """Iterator that several threads can share."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            return next(self._items)

    def close(self) -> None:
        """End the iteration for all threads."""
        with self._lock:
            self._items = iter(())


class _Pools:
    """Pools of threads, by the numbers of blocks and of threads of PyTorch's operators."""

    def __init__(self) -> None:
        self._drop()
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            # A forked process has none of the threads.
            os.register_at_fork(after_in_child=self._drop)

    def _drop(self) -> None:
        self._lock, self._pools = threading.Lock(), dict[tuple[int, int], ThreadPoolExecutor]()

    def get(self, blocks: int, threads: int) -> ThreadPoolExecutor:
        """Return a pool whose threads each have an equal part of ``threads`` cores for PyTorch's operators."""
        with self._lock:
            if (blocks, threads) not in self._pools:
                self._pools[blocks, threads] = _started_pool(blocks, threads // blocks)
            return self._pools[blocks, threads]


def _started_pool(threads: int, cores: int) -> ThreadPoolExecutor:
    """Return a pool of threads, each with a number of cores for PyTorch's operators."""
    own, started = torch.get_num_threads(), threading.Barrier(threads)

    def start() -> None:
        _thread.is_block_thread = True
        # A thread takes the process's number when it first asks. A number set after that is its own, but also the
        # process's for later threads, so it is restored below.
        torch.get_num_threads()
        torch.set_num_threads(cores)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="fastfold-block", initializer=start)
    wait([pool.submit(started.wait) for _ in range(threads)])
    torch.set_num_threads(own)
    return pool


class _Thread(threading.local):
    is_block_thread = False  #: True in a thread that computes blocks for another


_thread = _Thread()
_pools = _Pools()
