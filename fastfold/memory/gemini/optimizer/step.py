"""Optimizer step on the host, one chunk of parameters after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.memory.gemini.checks import NotCopied
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import Chunk
from fastfold.memory.gemini.distributed import Ranks


class OptimizerStep(NotCopied):
    """Stepper of a managed model's optimizer, which refuses other calls of its step.

    ``half_done`` is True if a step failed between two chunks.
    """

    def __init__(self, optimizer: Optimizer, store: ChunkStore, ranks: Ranks) -> None:
        self._optimizer, self._store, self._ranks = optimizer, store, ranks
        self._running = self.half_done = False
        self._guard = optimizer.register_step_pre_hook(self._refuse)

    def remove(self) -> None:
        """Allow the optimizer's own step again."""
        self._guard.remove()

    def check_whole(self) -> None:
        """Raise a ConfigError if a step failed half way."""
        if self.half_done:
            raise ConfigError(
                "an earlier step failed half way, so some parameters are a step ahead of others: continue from a "
                "checkpoint with load_state_dict() of the Gemini manager"
            )

    def settle_states(self) -> None:
        """Shard loaded optimizer states and keep this rank's shard on the host."""
        self._ranks.drop_states(self._store.chunks, self._optimizer)
        for chunk in self._store.chunks:
            self._store.settle_states(chunk, self._optimizer)

    def run(self) -> None:
        """Step all chunks that have gradients, after allocating their states."""
        optimizer, store = self._optimizer, self._store
        stepped = [chunk for chunk in store.chunks if chunk.arrived]
        own = [chunk for chunk in stepped if self._ranks.owns(chunk)]
        store.prepare_states(own, optimizer)
        following = dict(itertools.pairwise(own))
        groups = [group["params"] for group in optimizer.param_groups]
        self._running = self.half_done = True
        try:
            for chunk in stepped:
                if self._ranks.owns(chunk):
                    if chunk in following:
                        store.announce_step(following[chunk])
                    self._step(chunk, groups)
                self._ranks.broadcast_params(store, chunk)
            self.half_done = False
        finally:
            self._running = False
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters

    def _step(self, chunk: Chunk, groups: Sequence[Sequence[Tensor]]) -> None:
        here = {slot.parameter for slot in chunk.slots}
        for group, parameters in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"] = [p for p in parameters if p in here]
        with self._store.params_on_host([chunk]):
            self._optimizer.step()
        self._store.settle_states(chunk, self._optimizer)

    def _refuse(self, *_: Any) -> None:
        if not self._running:
            raise ConfigError(
                "parameters and gradients are managed: call step() of the Gemini manager, not of the optimizer"
            )
