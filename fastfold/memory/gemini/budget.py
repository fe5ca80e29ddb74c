"""Check the smallest memory of a managed model against device and host."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from fastfold.memory.devices.device import Device
from fastfold.memory.gemini.chunks import Chunk
from fastfold.memory.gemini.optimizer.probe import state_bytes, state_count
from fastfold.memory.planner.schedule import BudgetError
from fastfold.utils.machine import host_available_bytes


def check_budget(
    chunks: Sequence[Chunk], device: Device, budget: int, policy: str, optimizer: Optimizer | None
) -> None:
    """Refuse an insufficient budget in bytes before anything is moved.

    Raises:
        BudgetError: One operator's parameters exceed it; with ``"cuda"``, all kept tensors.
    """
    buffers = device.other_bytes()
    if policy == "cuda":
        states = state_bytes(optimizer) if optimizer is not None else 0
        trained = sum(chunk.nbytes + chunk.numel * states for chunk in chunks if chunk.trainable)
        smallest = buffers + sum(chunk.nbytes for chunk in chunks)
        smallest += trained if optimizer is not None else 0
        what = "policy 'cuda' keeps parameters, gradients and optimizer states on the device, which"
        remedy = "activations come on top. Policy 'auto' needs only one operator's parameters at a time"
    else:
        smallest = buffers + max((chunk.nbytes for chunk in chunks), default=0)
        what = "one operator's parameters and the model's buffers"
        remedy = "no smaller budget works, and activations come on top"
    if smallest > budget:
        raise BudgetError(
            f"a budget of {budget:,} bytes is too small: {what} take {smallest:,} bytes; {remedy}", smallest
        )


def kept_bytes(
    own: Sequence[Chunk], chunks: Sequence[Chunk], optimizer: Optimizer | None, *, multiple: int = 1
) -> int:
    """Return the bytes of parameters, gradients and optimizer states.

    Optimizer states of the chunks ``own`` are in this process; each tensor is aligned to ``multiple`` bytes.
    """

    def rounded(nbytes: int) -> int:
        return -(-nbytes // multiple) * multiple

    total = sum(rounded(chunk.nbytes) * (2 if chunk.trainable else 1) for chunk in chunks)
    if optimizer is not None:
        states, each = state_bytes(optimizer), state_count(optimizer) * (multiple - 1)
        total += sum(chunk.numel * states + each for chunk in own if chunk.trainable)
    return rounded(total)


def check_host(kept: int, chunks: Sequence[Chunk]) -> None:
    """Refuse a model that exceeds the host's free memory, including limits of control groups.

    Kept are the bytes of parameters, gradients and optimizer states; chunks on the host already need no further memory.

    Raises:
        BudgetError: The memory is insufficient; names the bytes needed.
    """
    parameters = [slot.parameter for chunk in chunks for slot in chunk.slots]
    needed = kept - sum(p.nbytes for p in parameters if p.device.type == "cpu")
    available = host_available_bytes()
    if needed > available:
        raise BudgetError(
            f"parameters, gradients and optimizer states take {needed:,} more bytes of the host's memory; "
            f"{available:,} are available to this process, including limits of its control groups. Policy 'nvme' "
            "keeps them on a disk",
            needed,
        )
