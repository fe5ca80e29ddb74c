"""Host copies and device copies of all chunks.

The host copies (in host memory, in memory-mapped files, or on the device) are authoritative: the optimizer updates
them, and checkpoints are written from them. Device copies are read-only, so eviction costs nothing. A parameter whose
chunk is not on the device keeps its shape, and raises an error when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory.devices.device import Device, DeviceFull
from fastfold.memory.devices.tiers import Tier
from fastfold.memory.gemini.chunks import Chunk, ChunkState, Slot
from fastfold.memory.gemini.managed_parameter import METADATA, untouched
from fastfold.memory.gemini.optimizer.probe import state_kinds
from fastfold.memory.planner.schedule import BudgetError

_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]


class ChunkStore:
    """Store that moves chunks between host and device.

    Args:
        chunks: All chunks; their parameters are moved to the host at once.
        device: Device of the model.
        host: Tier of parameters, gradients and optimizer states. If it is the device, nothing moves.

    Attributes:
        loads: Number of chunk loads so far.
        averaged: True if gradients are the mean over ranks and were not changed since.
        bring: Called before a function uses a chunk that no module has pinned, to pin it for the running module.
    """

    def __init__(self, chunks: Sequence[Chunk], device: Device, host: Tier) -> None:
        self.chunks, self.device, self.host = chunks, device, host
        self.fixed = host is device
        self.loads = 0
        self.averaged = False
        self.bring: Callable[[Chunk], None] = lambda chunk: None
        self._host_copies: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._gradients: dict[int, Tensor] = {}
        self._states: dict[tuple[int, str, torch.dtype], Tensor] = {}
        self._on_host = 0
        self._resident: set[int] = set()
        self._changed: set[int] = set()
        self._versions: dict[int, list[int]] = {}
        self._away: list[list[Tensor]] = []
        self._here: dict[int, list[Tensor]] = {}
        self._where: dict[Tensor, tuple[Chunk, Slot]] = {
            slot.parameter: (chunk, slot) for chunk in chunks for slot in chunk.slots
        }
        with device.host_work(), torch.no_grad():
            for chunk in chunks:
                self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        """Move a chunk to the host for the first time, with its gradients."""
        buffer = self._allocate(chunk.numel, chunk.dtype, "parameters")
        for slot in chunk.slots:
            slot.view(buffer).copy_(slot.parameter)
            if slot.parameter.grad is not None:
                slot.view(self.gradient(chunk)).copy_(slot.parameter.grad)
                slot.parameter.grad = None
                chunk.arrived.add(slot.name)
        self._host_copies.append(buffer)
        self._copies.append(buffer if self.fixed else self.device.reserve(chunk.numel, chunk.dtype))
        if self.fixed:
            chunk.become(ChunkState.HOLD)
            self._resident.add(chunk.index)
        self._away.append([self._blank(slot) for slot in chunk.slots])
        self._place(chunk, chunk.views(buffer) if self.fixed else self._away[-1])
        chunk.manage(
            self.fixed, partial(self._use, chunk), self._copy_of, partial(self._store_gradient, chunk)
        )

    @staticmethod
    def _place(chunk: Chunk, views: Sequence[Tensor]) -> None:
        with untouched():
            for slot, view in zip(chunk.slots, views, strict=True):
                slot.parameter.data = view

    def _allocate(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        try:
            with self.device.host_work():
                return self.host.allocate_kept(numel, dtype, what)
        except DeviceFull as error:
            raise BudgetError(
                f"policy 'cuda' keeps {what} on the device, and they do not fit: {error}. Policy 'auto' needs only "
                "one operator's parameters at a time",
                error.used + error.wanted,
            ) from error

    def _blank(self, slot: Slot) -> Tensor:
        """Return a read-only NaN placeholder of the parameter's shape, without memory."""
        parameter = slot.parameter
        value = float("nan") if parameter.is_floating_point() else 0
        return torch.full((), value, dtype=parameter.dtype, device=self.device.device).expand(slot.shape)

    def chunk_of(self, parameter: nn.Parameter) -> Chunk | None:
        """Return the chunk of a managed parameter; None for others."""
        place = self._where.get(parameter)
        return None if place is None else place[0]

    @property
    def on_host(self) -> bool:
        """True if parameters are plain tensors on the host."""
        return self._on_host > 0

    @property
    def resident(self) -> frozenset[int]:
        """Chunks with a copy on the device."""
        return frozenset(self._resident)

    def load(self, index: int) -> None:
        """Copy a chunk to the device.

        Raises:
            BudgetError: The budget has no room for it.
        """
        chunk, copy = self.chunks[index], self._copies[index]
        with self.device.host_work(), torch.no_grad():
            try:
                self.device.fill(copy, self._host_copies[index])
            except DeviceFull as error:
                needed = error.used + error.wanted
                raise BudgetError(
                    f"a budget of {error.budget:,} bytes is too small: {error}. This operator needs at least "
                    f"{needed:,} bytes; shorter inputs, a smaller batch or activation checkpointing need less",
                    needed,
                ) from error
            chunk.become(ChunkState.HOLD)
            if index not in self._here:  # a buffer without memory has no views
                self._here[index] = chunk.views(copy)
            self._place(chunk, self._here[index])
        self._versions[index] = self._versions_of(chunk)
        self._resident.add(index)
        self.loads += 1

    def announce(self, indices: Iterable[int]) -> None:
        """Announce that chunks will be loaded soon."""
        for index in indices:
            self.host.announce(self._host_copies[index])

    def announce_step(self, chunk: Chunk) -> None:
        """Announce that the optimizer will step a chunk soon."""
        states = [state for (index, _, _), state in self._states.items() if index == chunk.index]
        for buffer in (self._host_copies[chunk.index], self.gradient(chunk), *states):
            self.host.announce(buffer)

    def evict(self, index: int) -> None:
        """Free the device copy of a chunk."""
        chunk = self.chunks[index]
        has_moved = self._keep_moved(chunk, self._here[index])
        chunk.become(ChunkState.FREE)
        if has_moved or index in self._changed or self._versions_of(chunk) != self._versions[index]:
            # An operator has changed weights in place, as max_norm of an embedding does.
            self._changed.discard(index)
            self.device.wait(self._copies[index])
            self.device.fetch(self._copies[index], self._host_copies[index], self.host, add=False)
            self.device.settle()
        with self.device.host_work(), torch.no_grad():
            self.device.drop(self._copies[index])
            self._place(chunk, self._away[index])
        self._resident.discard(index)

    def _use(self, chunk: Chunk, func: Callable[..., Any]) -> bool:
        """Return True if a function may use a chunk's parameters as plain ones."""
        if chunk.state is not ChunkState.COMPUTE and func not in METADATA:
            self.bring(chunk)
        if chunk.state is not ChunkState.COMPUTE:
            return False
        if func == _DATA and not self.fixed:
            # Changes of `.data` are not counted, so the chunk is written back.
            self._changed.add(chunk.index)
        return True

    @staticmethod
    def _versions_of(chunk: Chunk) -> list[int]:
        with untouched():
            return [slot.parameter._version for slot in chunk.slots]

    def wait(self, index: int) -> None:
        """Wait until a chunk's copy has finished."""
        if not self.fixed:
            self.device.wait(self._copies[index])

    def gradient(self, chunk: Chunk) -> Tensor:
        """Return the flat gradients of a chunk on the host; undefined for parameters without a gradient."""
        if chunk.index not in self._gradients:
            self._gradients[chunk.index] = self._allocate(chunk.numel, chunk.dtype, "gradients")
        return self._gradients[chunk.index]

    def host_copy(self, chunk: Chunk) -> Tensor:
        """Return the flat parameters of a chunk on the host."""
        return self._host_copies[chunk.index]

    def take_gradient(self, parameter: Tensor) -> None:
        """Move a gradient to the host and add it to earlier ones since the last clearing."""
        with untouched():
            gradient = parameter.grad
        if gradient is None:  # only terms of the loss outside of modules used it
            return
        chunk, slot = self._where[parameter]
        if chunk.state is not ChunkState.COMPUTE and not self.fixed:
            raise RuntimeError(
                f"the backward pass used {slot.name} while it was not on the device: its module returns tensors in "
                "something other than tuples, lists and dicts, or hides them"
            )
        with untouched():
            parameter.grad = None
        if gradient.layout is not torch.strided:
            raise ConfigError(f"{slot.name} has sparse gradients, which cannot be managed; use sparse=False")
        self._store_gradient(chunk, slot, gradient)

    def _copy_of(self, slot: Slot) -> Tensor:
        """Return a copy of a parameter on the device, for a term of the loss outside of modules."""
        chunk, _ = self._where[slot.parameter]
        if chunk.index in self._resident:
            self.wait(chunk.index)
            return slot.view(self._copies[chunk.index]).clone()
        return slot.view(self._host_copies[chunk.index]).to(self.device.device, copy=True)

    def _store_gradient(self, chunk: Chunk, slot: Slot, gradient: Tensor) -> None:
        add = slot.name in chunk.arrived
        with self.device.host_work(), torch.no_grad():
            view = slot.view(self.gradient(chunk))
            if not self.fixed:
                self.device.fetch(gradient, view, self.host, add=add)
            elif add:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        chunk.arrived.add(slot.name)
        self.averaged = False

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the existing gradients of some parameters on the host; they may be changed."""
        self.device.settle()
        places = [self._where[parameter] for parameter in parameters]
        return [slot.view(self.gradient(chunk)) for chunk, slot in places if slot.name in chunk.arrived]

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        self.device.settle()
        self.averaged = False
        for chunk in self.chunks:
            chunk.arrived.clear()
            if chunk.state in (ChunkState.HOLD_AFTER_BACKWARD, ChunkState.READY_FOR_REDUCE):
                chunk.become(ChunkState.HOLD)
            with untouched():
                for slot in chunk.slots:
                    slot.parameter.grad = None

    def work(self) -> AbstractContextManager[None]:
        """Return a context in which operators run on host copies, in any tier."""
        return nullcontext() if self.fixed else self.device.host_work()

    @contextmanager
    def params_on_host(self, chunks: Sequence[Chunk] | None = None) -> Iterator[None]:
        """Make parameters of some or all chunks, and their gradients, plain on the host inside; they may be changed.

        Raises:
            ConfigError: The optimizer has begun to step some of them.
        """
        self.device.settle()
        self._on_host += 1
        if self._on_host > 1:
            try:
                yield
            finally:
                self._on_host -= 1
            return
        chosen = self.chunks if chunks is None else chunks
        try:
            with self.work():
                for chunk in chosen:
                    self._move_to_host(chunk)
                yield
        finally:
            self._on_host -= 1
            with self.device.host_work(), torch.no_grad(), ExitStack() as left:
                for chunk in chosen:
                    left.callback(self._leave_host, chunk)

    def _move_to_host(self, chunk: Chunk) -> None:
        # Changes on the host make a device copy stale.
        if self.fixed:
            self._keep_moved(chunk, chunk.views(self._host_copies[chunk.index]))
        elif chunk.state is not ChunkState.FREE:
            self.evict(chunk.index)
        chunk.expose(True)
        for slot in chunk.slots:
            slot.parameter.data = slot.view(self._host_copies[chunk.index])
            arrived = slot.name in chunk.arrived
            slot.parameter.grad = slot.view(self._gradients[chunk.index]) if arrived else None

    def _leave_host(self, chunk: Chunk) -> None:
        self.averaged = False
        try:
            self._keep_moved(chunk, chunk.views(self._host_copies[chunk.index]))
        finally:
            for slot in chunk.slots:
                self._keep_gradient(chunk, slot)
            if not self.fixed:
                self._place(chunk, self._away[chunk.index])
            chunk.expose(False)

    def _keep_gradient(self, chunk: Chunk, slot: Slot) -> None:
        """Keep the present gradient of a plain parameter on the host."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        if gradient is None:
            chunk.arrived.discard(slot.name)
            return
        view = slot.view(self.gradient(chunk))
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        chunk.arrived.add(slot.name)

    def _keep_moved(self, chunk: Chunk, views: Sequence[Tensor]) -> bool:
        """Copy parameters that were given other memory (``.data =``, ``set_()``) back; return True if there are any.

        Raises:
            ConfigError: A parameter has another shape or dtype; it gets its former values.
        """

        def place(x: Tensor) -> tuple[Any, ...]:
            return x.data_ptr(), x.shape, x.stride()

        with untouched(), torch.no_grad():
            pairs = zip(chunk.slots, views, strict=True)
            moved = [(s, s.parameter.data, view) for s, view in pairs if place(s.parameter) != place(view)]
            for slot, _, view in moved:
                slot.parameter.data = view
            for slot, value, view in moved:
                if (value.shape, value.dtype) != (view.shape, view.dtype):
                    raise ConfigError(
                        f"{slot.name} has become {list(value.shape)} of {value.dtype}, and its manager keeps "
                        f"{list(view.shape)} of {view.dtype}: convert or resize a model after release()"
                    )
                view.copy_(value.clone())
        return bool(moved)

    def release(self) -> None:
        """Make the parameters plain tensors on the host permanently, with their gradients."""
        self.device.settle()
        with self.device.host_work(), torch.no_grad():
            for chunk in self.chunks:
                self._move_to_host(chunk)
                chunk.unmanage()

    def prepare_states(self, chunks: Sequence[Chunk], optimizer: torch.optim.Optimizer) -> None:
        """Allocate the optimizer states for a step of these chunks, all or none."""
        kinds: dict[nn.Parameter, dict[str, torch.dtype | None]] = {}
        stepped = {slot.parameter for chunk in chunks for slot in chunk.slots}
        for group in optimizer.param_groups:
            new = [p for p in group["params"] if p in stepped and not optimizer.state.get(p)]
            if new:
                with self.device.host_work():
                    kinds |= dict.fromkeys(new, state_kinds(optimizer, group))
        made: list[tuple[int, str, torch.dtype]] = []
        try:
            for chunk in chunks:
                wanted = {
                    (chunk.index, name, dtype or chunk.dtype)
                    for slot in chunk.slots
                    for name, dtype in kinds.get(slot.parameter, {}).items()
                }
                for key in sorted(wanted - self._states.keys(), key=str):
                    self._states[key] = self._allocate(chunk.numel, key[2], "optimizer states")
                    made.append(key)
        except BaseException:
            for key in made:
                del self._states[key]
            raise

    def settle_states(self, chunk: Chunk, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer's states of a chunk to the host."""
        with self.device.host_work(), torch.no_grad():
            for slot in chunk.slots:
                states: dict[str, Any] = optimizer.state.get(slot.parameter, {})
                for name, value in states.items():
                    if not isinstance(value, Tensor) or value.shape != slot.shape or name == "step":
                        continue
                    key = (chunk.index, name, value.dtype)
                    if key not in self._states:
                        self._states[key] = self._allocate(chunk.numel, value.dtype, "optimizer states")
                    view = slot.view(self._states[key])
                    if value.data_ptr() != view.data_ptr():
                        view.copy_(value)
                        states[name] = view
