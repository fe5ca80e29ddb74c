"""Data parallel training of a managed model: mean gradients, equal plans, and sharded optimizer states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory.gemini.access_trace import AccessTrace
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import Chunk
from fastfold.utils.module_structure import differences, digest, module_structure

T = TypeVar("T")


class Ranks:
    """Processes of a managed model.

    Gradients are averaged over ``group``, unless other code does, and ranks of ``statistics`` (by default the same)
    make equal plans. With ``shard`` each steps its share of the chunks and keeps only their optimizer states (ZeRO
    stage 1).
    """

    def __init__(
        self, group: dist.ProcessGroup | None, statistics: dist.ProcessGroup | None, shard: bool
    ) -> None:
        self.group = group
        self.statistics = group if statistics is None else statistics
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.shard = shard and self.size > 1
        self._buffers: dict[str, tuple[Tensor, int]] = {}

    @property
    def count(self) -> int:
        """Number of processes that train the model together."""
        several = self.group is not None or self.statistics is not None
        return max(self.size, dist.get_world_size(self.statistics)) if several else 1

    def check_model(self, model: nn.Module) -> None:
        """Refuse models that differ between the processes.

        Raises:
            ConfigError: Names, shapes, dtypes, buffers or frozen parameters differ. Every rank raises.
        """
        if self.group is None:
            return
        own = module_structure(model)
        for other, theirs in enumerate(_gathered(digest(own), self.group)):
            if theirs != digest(own):
                facts = _gathered(own, self.group)
                raise ConfigError(
                    "the models of the processes in GeminiConfig(group=...) differ: "
                    f"{differences(own, facts[other], self.rank, other)}"
                )

    def align(self, store: ChunkStore, model: nn.Module) -> None:
        """Copy the first process's parameters and buffers to all."""
        if self.group is None:
            return
        first = dist.get_global_rank(self.group, 0)
        with store.work(), torch.no_grad():
            for x in (*map(store.host_copy, store.chunks), *model.buffers()):
                sent = x.contiguous()
                dist.broadcast(sent, first, group=self.group)
                if sent is not x:
                    x.copy_(sent)
        self._buffers = {name: (x, x._version) for name, x in model.named_buffers()}

    def _changed_buffers(self) -> dict[str, tuple[float, float]]:
        """Return the buffers changed by a forward pass, each with two numbers computed from its values."""
        changed = {name: x for name, (x, version) in self._buffers.items() if x._version != version}
        self._buffers |= {name: (x, x._version) for name, x in changed.items()}
        return {name: (float(x.double().sum()), float(x.double().norm())) for name, x in changed.items()}

    def agree(self, traces: list[AccessTrace]) -> list[AccessTrace]:
        """Gather the traces of all ranks in rank order; the planner keeps the largest numbers."""
        return [trace for of_rank in _gathered(traces, self.statistics) for trace in of_rank]

    def owns(self, chunk: Chunk) -> bool:
        """Return True if this rank steps a chunk."""
        return not self.shard or chunk.index % self.size == self.rank

    def average(self, store: ChunkStore) -> None:
        """Average gradients over all ranks, for parameters with a gradient on any rank.

        Gradients that are averaged already are left unchanged.

        Raises:
            ConfigError: A forward pass has changed a buffer differently on each rank.
        """
        if self.group is None:
            return
        changed = self._changed_buffers()
        own = store.averaged, [sorted(chunk.arrived) for chunk in store.chunks], changed
        of_all = _gathered(own, self.group)
        for _, _, theirs in of_all:
            if theirs != changed:
                raise ConfigError(
                    "the processes of GeminiConfig(group=...) have different values of "
                    f"{next(iter(changed | theirs))}, which forward() changes by its part of the batch: call eval() on "
                    "its module, leave out the change, or sum it over the processes"
                )
        if all(averaged for averaged, _, _ in of_all):
            return
        arrived = zip(*(names for _, names, _ in of_all), strict=True)
        unions = [{name for of_one in names for name in of_one} for names in arrived]
        wanted = [(chunk, names) for chunk, names in zip(store.chunks, unions, strict=True) if names]
        # Allocate before anything is changed, so that a failure changes nothing.
        gradients = [store.gradient(chunk) for chunk, _ in wanted]
        with store.work(), torch.no_grad():
            for (chunk, names), gradient in zip(wanted, gradients, strict=True):
                for slot in chunk.slots:
                    if slot.name not in chunk.arrived:
                        slot.view(gradient).zero_()
                dist.all_reduce(gradient, group=self.group)
                gradient.div_(self.size)
                chunk.arrived |= names
        store.averaged = True

    def broadcast_params(self, store: ChunkStore, chunk: Chunk) -> None:
        """Broadcast the parameters that a chunk's owner has stepped."""
        if self.shard:
            with store.params_on_host([chunk]), torch.no_grad():
                dist.broadcast(store.host_copy(chunk), self._owner(chunk), group=self.group)

    def gather_states(self, chunks: Sequence[Chunk], optimizer: torch.optim.Optimizer) -> None:
        """Gather the optimizer's states of all chunks on every rank, to write them (a collective)."""
        for chunk in chunks if self.shard else ():
            own = [optimizer.state.get(slot.parameter, {}) for slot in chunk.slots]
            # Tensors of their own, which do not share memory with a chunk.
            sent = [
                [
                    {k: x.detach().clone() if isinstance(x, Tensor) else x for k, x in one.items()}
                    for one in own
                ]
            ]
            dist.broadcast_object_list(sent, self._owner(chunk), group=self.group)
            if not self.owns(chunk):
                for slot, states in zip(chunk.slots, sent[0], strict=True):
                    if states:
                        optimizer.state[slot.parameter] = states

    def drop_states(self, chunks: Sequence[Chunk], optimizer: torch.optim.Optimizer) -> None:
        """Keep only the optimizer's states of this rank's share."""
        for chunk in chunks:
            if not self.owns(chunk):
                for slot in chunk.slots:
                    optimizer.state.pop(slot.parameter, None)

    def _owner(self, chunk: Chunk) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, chunk.index % self.size)


def _gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    of_all: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(of_all, value, group=group)
    return of_all
