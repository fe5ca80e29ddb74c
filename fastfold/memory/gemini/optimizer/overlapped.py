"""The optimizer's step of a chunk in a thread beside the backward pass, as soon as the chunk's gradients are complete.

It comes to the same numbers as a step after the backward pass, because it steps the same tensors with the same numbers
of the optimizer's groups. What would make a difference (a look at all gradients, more gradients after the step, a rate
that is set later, a pass on parameters that are a step ahead) is refused.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.memory.gemini.checks import NotCopied
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import Chunk, ChunkState
from fastfold.memory.gemini.distributed import Ranks
from fastfold.memory.gemini.optimizer.probe import Group, same
from fastfold.memory.gemini.optimizer.stand_in import check_stand_ins, step_stand_ins
from fastfold.memory.gemini.optimizer.worker import Worker

MIN_OVERLAPPED_CHUNKS = 16
"""Chunks of equal size that a model makes at least: a chunk's step begins when the last of its gradients has come."""

# Bytes of gradients that may wait for the thread.
_WAITING = 1 << 28


class OverlappedStep(NotCopied):
    """Steps complete chunks in a thread while the backward pass runs.

    Args:
        optimizer: One that :func:`check_overlap` lets pass.
        store: The chunks, whose optimizer states are allocated now.

    Attributes:
        beside: Bytes of parameters whose step began while the backward pass had more operators to come, so far.
        after: Bytes of those that were complete only at its end.
    """

    def __init__(self, optimizer: Optimizer, store: ChunkStore) -> None:
        self._optimizer, self._store = optimizer, store
        self.beside = self.after = 0
        self._postponed = 0
        self._arrived: defaultdict[int, set[str]] = defaultdict(set)
        # Gradients that have left the device wait in buffers of their own until the thread has come to them.
        self._worker = Worker("gemini-optimizer", _WAITING)
        self._groups: list[Group] = []
        store.prepare_states([chunk for chunk in store.chunks if chunk.trainable], optimizer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to gradients, and no chunk is stepped."""
        self._postponed += 1
        try:
            yield
        finally:
            self._postponed -= 1

    # As the backward pass goes on

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """Move a gradient to the host, as :meth:`ChunkStore.take_gradient` does."""
        self._store.take_gradient(parameter)
        chunk, slot = self._store.place_of(parameter)
        self._arrived[chunk.index].add(slot.name)

    def released(self, indices: Iterable[int]) -> None:
        """Operators do not use these chunks any more: those begin to be stepped of which all gradients have come.

        Args:
            indices: Of chunks that may be in use by others after all.
        """
        for index in indices:
            chunk = self._store.chunks[index]
            complete = len(self._arrived[index]) == len(chunk.slots)
            if complete and not self._postponed and chunk.state is not ChunkState.COMPUTE:
                self._begin(chunk)

    def end_backward(self, indices: Iterable[int]) -> None:
        """A backward pass is over; it had used these chunks until now."""
        before = self.beside
        self.released(indices)
        self.after += self.beside - before
        self.beside = before
        self._arrived.clear()

    def begin_pass(self) -> None:
        """A forward pass begins; gradients of an earlier backward pass that raised are no part of the next one."""
        self._store.refuse_ahead("a forward pass")
        self._arrived.clear()

    def _begin(self, chunk: Chunk) -> None:
        index, here = chunk.index, {slot.parameter: slot for slot in chunk.slots}
        members = [[p for p in group["params"] if p in here] for group in self._optimizer.param_groups]
        if index in self._store.ahead or not any(members):
            return
        if not self._store.ahead:
            _check_hooks(self._optimizer, own=1)
            self._groups = self._numbers()
        gradient, numbers = self._store.gradient(chunk), self._store.host_copy(chunk)
        arrive = self._store.device.hand_over(gradient)
        self._store.announce_step(chunk)
        self._store.ahead.add(index)
        groups = [{**group, "params": own} for group, own in zip(self._groups, members, strict=True)]

        def step() -> None:
            arrive()
            views = {p: (slot.view(numbers), slot.view(gradient)) for p, slot in here.items()}
            step_stand_ins(self._optimizer, groups, views)

        self._worker.put(step, chunk.nbytes)
        self.beside += chunk.nbytes

    def _numbers(self) -> list[Group]:
        """What the groups say now, without their parameters."""
        with self._store.work():
            return [
                {name: copy.deepcopy(x) for name, x in group.items() if name != "params"}
                for group in self._optimizer.param_groups
            ]

    # The step of all

    def finish(self) -> frozenset[int]:
        """Wait for the thread.

        Returns:
            Indices of the chunks that have been stepped.

        Raises:
            ConfigError: The optimizer's groups have changed since the first chunk was stepped.
            BaseException: What the step of a chunk has raised.
        """
        store, groups = self._store, self._groups
        done = frozenset(store.ahead)
        error = self.abandon()
        for index in done:
            # Copies on the device are a step behind.
            if store.chunks[index].state is not ChunkState.FREE:
                store.evict(index)
        if error is not None:
            raise error
        for index in done:
            store.settle_states(store.chunks[index], self._optimizer)
        if done and not same(groups, self._numbers(), exact=True):
            raise ConfigError(
                "numbers of the optimizer's groups were changed between backward() and step(), when a part of the "
                "parameters had been stepped already: with overlap_optimizer set learning rates before backward()"
            )
        return done

    def abandon(self) -> BaseException | None:
        """Wait for the thread; give back what a step in it has raised."""
        error = self._worker.finish()
        self._arrived.clear()
        self._store.ahead.clear()
        return error


def check_overlap(optimizer: Optimizer | None, policy: str, ranks: Ranks) -> None:
    """Refuse what a step beside the backward pass would get wrong, or gain nothing from.

    Args:
        optimizer: Not yet managed.
        policy: Where parameters live.
        ranks: The processes.

    Raises:
        ConfigError: There is no optimizer, or one whose step has hooks or cannot run in a thread; the policy is
            ``"cuda"``; there are several processes.
    """
    if optimizer is None:
        raise ConfigError("overlap_optimizer needs an optimizer: give one to Gemini(model, optimizer)")
    if policy == "cuda":
        raise ConfigError(
            "policy 'cuda' steps parameters on the device, where nothing runs beside the backward pass: set "
            "overlap_optimizer=False, or policy 'auto'"
        )
    if ranks.count > 1:
        raise ConfigError(
            "overlap_optimizer steps a parameter before gradients of other processes are there: set "
            "overlap_optimizer=False, or train with one process"
        )
    _check_hooks(optimizer, own=0)
    check_stand_ins(optimizer)


def _check_hooks(optimizer: Any, own: int) -> None:
    """``own`` of the hooks are the manager's."""
    if len(optimizer._optimizer_step_pre_hooks) > own or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            "overlap_optimizer and hooks of the optimizer's step do not go together, because parts of the step run "
            "before they would be called: remove the hooks, or set overlap_optimizer=False"
        )
