"""Step of a chunk in a thread during the backward pass, as soon as its gradients are complete.

The result equals a step after the backward pass, because the same tensors are stepped with the same settings of the
optimizer's groups. Actions that would change the result are refused: reading all gradients, accumulating more
gradients after the step, setting a rate later, or a pass on parameters that are a step ahead.
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
"""Smallest number of equal chunks of a model; a chunk's step begins after the last of its gradients."""

# Bytes of gradients that may wait for the thread.
_WAITING = 1 << 28


class OverlappedStep(NotCopied):
    """Stepper of complete chunks in a thread, while the backward pass runs.

    Args:
        optimizer: Optimizer accepted by :func:`check_overlap`.
        store: Chunks; their optimizer states are allocated now.

    Attributes:
        overlapped: Bytes of parameters whose step began before the last operator of a backward pass.
        after: Bytes of parameters that were complete only at its end.
    """

    def __init__(self, optimizer: Optimizer, store: ChunkStore) -> None:
        self._optimizer, self._store = optimizer, store
        self.overlapped = self.after = 0
        self._postponed = 0
        self._arrived: defaultdict[int, set[str]] = defaultdict(set)
        # Gradients wait in separate buffers until the thread uses them.
        self._worker = Worker("gemini-optimizer", _WAITING)
        self._groups: list[Group] = []
        store.prepare_states([chunk for chunk in store.chunks if chunk.trainable], optimizer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in backward passes inside, without stepping chunks."""
        self._postponed += 1
        try:
            yield
        finally:
            self._postponed -= 1

    # During the backward pass

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """Move a gradient to the host, as :meth:`ChunkStore.take_gradient` does."""
        self._store.take_gradient(parameter)
        chunk, slot = self._store.place_of(parameter)
        self._arrived[chunk.index].add(slot.name)

    def released(self, indices: Iterable[int]) -> None:
        """Begin to step the chunks that are released by operators and have all gradients.

        Args:
            indices: Released chunks, which other operators may still use.
        """
        for index in indices:
            chunk = self._store.chunks[index]
            complete = len(self._arrived[index]) == len(chunk.slots)
            if complete and not self._postponed and chunk.state is not ChunkState.COMPUTE:
                self._begin(chunk)

    def end_backward(self, indices: Iterable[int]) -> None:
        """End a backward pass, which used these chunks."""
        before = self.overlapped
        self.released(indices)
        self.after += self.overlapped - before
        self.overlapped = before
        self._arrived.clear()

    def begin_pass(self) -> None:
        """Begin a forward pass and forget gradients of a failed backward pass."""
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
        self.overlapped += chunk.nbytes

    def _numbers(self) -> list[Group]:
        """Return the settings of the optimizer's groups, without parameters."""
        with self._store.work():
            return [
                {name: copy.deepcopy(x) for name, x in group.items() if name != "params"}
                for group in self._optimizer.param_groups
            ]

    # Final step

    def finish(self) -> frozenset[int]:
        """Wait for the thread.

        Returns:
            Indices of the stepped chunks.

        Raises:
            ConfigError: The optimizer's groups have changed since the first chunk was stepped.
            BaseException: Exception of a chunk's step.
        """
        store, groups = self._store, self._groups
        done = frozenset(store.ahead)
        error = self.abandon()
        for index in done:
            # Device copies are a step behind.
            if store.chunks[index].state is not ChunkState.FREE:
                store.evict(index)
        if error is not None:
            raise error
        for index in done:
            store.settle_states(store.chunks[index], self._optimizer)
        if done and not same(groups, self._numbers(), exact=True):
            raise ConfigError(
                "settings of the optimizer's groups were changed between backward() and step(), when some "
                "parameters had been stepped already: with overlap_optimizer set learning rates before backward()"
            )
        return done

    def abandon(self) -> BaseException | None:
        """Wait for the thread; return the exception of a step, if any."""
        error = self._worker.finish()
        self._arrived.clear()
        self._store.ahead.clear()
        return error


def check_overlap(optimizer: Optimizer | None, policy: str, ranks: Ranks) -> None:
    """Refuse settings for which the overlapped step would be wrong or useless.

    Args:
        optimizer: Optimizer that is not managed yet.
        policy: Policy of the manager.
        ranks: Processes of the model.

    Raises:
        ConfigError: The optimizer is missing, has step hooks, or cannot run in a thread; the policy is
            ``"cuda"``; there are several processes.
    """
    if optimizer is None:
        raise ConfigError("overlap_optimizer needs an optimizer: pass one to Gemini(model, optimizer)")
    if policy == "cuda":
        raise ConfigError(
            "policy 'cuda' steps parameters on the device, where a step cannot overlap the backward pass: set "
            "overlap_optimizer=False, or policy 'auto'"
        )
    if ranks.count > 1:
        raise ConfigError(
            "overlap_optimizer steps a parameter before gradients of other processes arrive: set "
            "overlap_optimizer=False, or train with one process"
        )
    _check_hooks(optimizer, own=0)
    check_stand_ins(optimizer)


def _check_hooks(optimizer: Any, own: int) -> None:
    """Refuse step hooks other than the manager's ``own``."""
    if len(optimizer._optimizer_step_pre_hooks) > own or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            "overlap_optimizer does not support hooks of the optimizer's step, because parts of the step run before "
            "they are called: remove the hooks, or set overlap_optimizer=False"
        )
