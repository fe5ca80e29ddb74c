"""Chunks of parameters, and the states of a chunk.

One copy of some megabytes replaces hundreds of small ones. A module's own parameters stay together, so that an operator
needs one chunk. Frozen and trainable parameters have separate chunks, because only the latter have gradients and
optimizer states. Modules with children have separate chunks too, because their parameters stay on the device while
the children run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.memory.devices.tiers import ALIGNMENT
from fastfold.memory.gemini.managed_parameter import Place, manage, unmanage


class ChunkState(enum.Enum):
    """State of a chunk's device copy."""

    FREE = "not on the device"
    HOLD = "on the device, idle"
    COMPUTE = "an operator uses it"
    HOLD_AFTER_BACKWARD = "on the device, idle, and some of its gradients have been computed"
    READY_FOR_REDUCE = "all of its gradients have been computed"


_LEGAL = {
    ChunkState.FREE: {ChunkState.HOLD},
    ChunkState.HOLD: {ChunkState.FREE, ChunkState.COMPUTE},
    ChunkState.COMPUTE: {ChunkState.HOLD, ChunkState.HOLD_AFTER_BACKWARD},
    # A shared parameter, a recomputed block and a second pass before the optimizer compute again. Clearing gradients
    # returns to HOLD.
    ChunkState.HOLD_AFTER_BACKWARD: set(ChunkState) - {ChunkState.HOLD_AFTER_BACKWARD},
    ChunkState.READY_FOR_REDUCE: {ChunkState.FREE, ChunkState.COMPUTE, ChunkState.HOLD},
}


class IllegalTransition(RuntimeError):
    """Change of state that would lose data or use freed memory: an error in the manager."""


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill a block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.layout is torch.strided


@dataclass
class Slot:
    """Place of a parameter, with its first name in the model, in its chunk; ``offset`` is its first element there."""

    name: str
    parameter: nn.Parameter
    offset: int
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape
        dense = self.parameter if is_dense(self.parameter) else torch.empty(self.shape, device="meta")
        self.stride = dense.stride()

    def view(self, buffer: Tensor) -> Tensor:
        """Return the parameter's part of a flat chunk buffer, with its shape and memory format."""
        part = buffer[self.offset : self.offset + self.shape.numel()]
        return part.as_strided(self.shape, self.stride)


class Chunk:
    """Parameters that move together.

    The number of elements includes gaps and the unused end.

    Attributes:
        state: Changed only by :meth:`become`. While it is ``COMPUTE``, functions use the parameters.
        arrived: Parameters whose gradient has been computed since gradients were last cleared.
    """

    def __init__(self, index: int, slots: Sequence[Slot], numel: int) -> None:
        self.index, self.slots, self.numel = index, list(slots), numel
        self.dtype = self.slots[0].parameter.dtype
        self.trainable = self.slots[0].parameter.requires_grad
        self.state = ChunkState.FREE
        self.arrived: set[str] = set()
        self._places: list[Place] | None = None

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the parameters' parts of a flat buffer, which must have memory."""
        return [slot.view(buffer) for slot in self.slots]

    def manage(
        self,
        readable: bool,
        use: Callable[[Callable[..., Any]], bool],
        read: Callable[[Slot], Tensor],
        add_gradient: Callable[[Slot, Tensor], None],
    ) -> None:
        """Refuse reads of the parameters, or of ``readable`` ones' gradients, while no operator uses them.

        ``use`` is called with each function of the parameters; it returns True if the function may use them.
        """
        self._places = [
            Place(
                slot.name,
                slot.shape,
                slot.stride,
                readable,
                use,
                has_gradient=partial(self.arrived.__contains__, slot.name),
                read=partial(read, slot),
                add_gradient=partial(add_gradient, slot),
            )
            for slot in self.slots
        ]
        self.expose(False)

    def unmanage(self) -> None:
        """Make the parameters plain permanently."""
        self._places = None
        self.expose(True)

    def expose(self, plain: bool) -> None:
        """Make the parameters plain, or refuse reads while no operator uses them."""
        parameters = [slot.parameter for slot in self.slots]
        if plain:
            unmanage(parameters)
        elif self._places is not None:
            manage(parameters, self._places)

    @property
    def nbytes(self) -> int:
        """Size of one copy in bytes."""
        return self.numel * self.dtype.itemsize

    def become(self, state: ChunkState) -> None:
        """Change the state; raise :class:`IllegalTransition` if the change is not allowed."""
        if state not in _LEGAL[self.state]:
            raise IllegalTransition(f"chunk {self.index} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def idle(self) -> None:
        """Set the state after an operator, according to the gradients computed so far."""
        if not self.arrived:
            self.become(ChunkState.HOLD)
            return
        self.become(ChunkState.HOLD_AFTER_BACKWARD)
        if len(self.arrived) == len(self.slots):
            self.become(ChunkState.READY_FOR_REDUCE)


def round_up(numel: int, dtype: torch.dtype) -> int:
    """Round a number of elements up to the next aligned offset."""
    step = ALIGNMENT // dtype.itemsize
    return -(-numel // step) * step


def search_chunk_size(units: Sequence[int], largest: int | None = None) -> int:
    """Find the chunk size with the least waste when unsplit units are packed in the order of use.

    The search ends at ``largest``, at least the largest unit and by default four times of it. Among equals it chooses
    the smallest size, which moves the fewest bytes.
    """
    lowest = max(units)
    highest = max(lowest, largest if largest is not None else 4 * lowest)
    # Waste changes only where a further run of units fits, so only sums of runs are tried.
    candidates = {lowest}
    for first in range(min(len(units), 256)):
        total = 0
        for size in units[first:]:
            total += size
            if total > highest:
                break
            candidates.add(max(total, lowest))
    return min(candidates, key=lambda size: (waste(units, size), size))


def waste(units: Sequence[int], size: int) -> int:
    """Return the waste over all chunks of a size."""
    count, room = 0, 0
    for unit in units:
        if unit > room:
            count, room = count + 1, size
        room -= unit
    return count * size - sum(units)


def build_chunks(model: nn.Module, largest: int | None = None) -> list[Chunk]:
    """Pack all parameters of a model, also shared ones, once each; each belongs to the first module that has it.

    The chunks are numbered from 0. ``largest`` is the upper end of the search for their size, in bytes.
    """
    groups: dict[tuple[torch.dtype, bool, bool], list[list[tuple[str, nn.Parameter]]]] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        own: dict[tuple[torch.dtype, bool, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                parent = next(module.children(), None) is not None
                own.setdefault((parameter.dtype, parameter.requires_grad, parent), []).append(
                    (name, parameter)
                )
        for key, unit in own.items():
            groups.setdefault(key, []).append(unit)
    chunks: list[Chunk] = []
    for (dtype, _, _), units in groups.items():
        sizes = [sum(round_up(p.numel(), dtype) for _, p in unit) for unit in units]
        limit = None if largest is None else largest // dtype.itemsize
        size = search_chunk_size(sizes, limit)
        packed: list[list[tuple[str, nn.Parameter]]] = []
        room = 0
        for unit, size_of_unit in zip(units, sizes, strict=True):
            if size_of_unit > room or not packed:
                packed.append([])
                room = size
            packed[-1] += unit
            room -= size_of_unit
        for members in packed:
            slots, offset = [], 0
            for name, parameter in members:
                slots.append(Slot(name, parameter, offset))
                offset += round_up(parameter.numel(), dtype)
            chunks.append(Chunk(len(chunks), slots, min(size, sum(sizes))))
    return chunks
