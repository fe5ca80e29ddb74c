"""What a managed model takes at least, on the device and on the host, compared with what there is."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from fastfold.memory.devices.device import Device
from fastfold.memory.gemini.chunks import Chunk
from fastfold.memory.gemini.optimizer.probe import state_bytes, state_count
from fastfold.memory.planner.schedule import BudgetError
from fastfold.utils.host_memory import host_available_bytes


def check_budget(
    chunks: Sequence[Chunk], device: Device, budget: int, policy: str, optimizer: Optimizer | None
) -> None:
    """Refuse a budget that cannot work, before anything is moved.

    Args:
        chunks: The model's parameters.
        device: With its buffers.
        budget: Bytes on it.
        policy: As :class:`fastfold.memory.Gemini` takes it.
        optimizer: None for inference.

    Raises:
        BudgetError: One operator's parameters, or with ``"cuda"`` all that is kept, exceed it.
    """
    buffers = device.other_bytes()
    if policy == "cuda":
        states = state_bytes(optimizer) if optimizer is not None else 0
        trained = sum(chunk.nbytes + chunk.numel * states for chunk in chunks if chunk.trainable)
        smallest = buffers + sum(chunk.nbytes for chunk in chunks)
        smallest += trained if optimizer is not None else 0
        what = "policy 'cuda' keeps parameters, gradients and optimizer states on the device, which"
        remedy = "activations come on top. Policy 'auto' needs no more than one operator at a time"
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
    """Bytes of parameters, gradients and optimizer states.

    Args:
        own: Chunks whose states are here.
        chunks: All of them.
        optimizer: None for inference.
        multiple: Of bytes, on which each begins.
    """

    def rounded(nbytes: int) -> int:
        return -(-nbytes // multiple) * multiple

    total = sum(rounded(chunk.nbytes) * (2 if chunk.trainable else 1) for chunk in chunks)
    if optimizer is not None:
        states, each = state_bytes(optimizer), state_count(optimizer) * (multiple - 1)
        total += sum(chunk.numel * states + each for chunk in own if chunk.trainable)
    return rounded(total)


def check_host(kept: int, chunks: Sequence[Chunk]) -> None:
    """Refuse what the host's memory has no room for, as the system and its control groups limit it.

    Args:
        kept: Bytes of parameters, gradients and optimizer states.
        chunks: Parameters that are on the host already take no more room there.

    Raises:
        BudgetError: There is not enough; names what is needed.
    """
    parameters = [slot.parameter for chunk in chunks for slot in chunk.slots]
    needed = kept - sum(p.nbytes for p in parameters if p.device.type == "cpu")
    available = host_available_bytes()
    if needed > available:
        raise BudgetError(
            f"parameters, gradients and optimizer states take {needed:,} more bytes of the host's memory, of which "
            f"{available:,} are left to this process (limits of its control groups counted): policy 'nvme' keeps them "
            "on a disk",
            needed,
        )
