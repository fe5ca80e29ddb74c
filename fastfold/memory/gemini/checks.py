"""Refuse models, optimizers and budgets that cannot be managed, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.memory.devices.device import Device
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.chunks import Chunk
from fastfold.memory.gemini.managed_parameter import ManagedParameter, untouched
from fastfold.memory.gemini.optimizer.probe import check_steps_alone, state_bytes, state_count
from fastfold.memory.planner.schedule import BudgetError
from fastfold.utils.machine import host_available_bytes
from fastfold.utils.module_structure import check_memory, check_shapes


class NotCopied:
    """Base of objects that belong to one model and cannot be copied with it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__reduce_ex__(4)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a managed model can be neither copied nor pickled: take state_dict() of it or of its Gemini manager, or "
            "release() it first"
        )


def check_model(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Refuse a model that cannot be managed.

    Raises:
        ConfigError: A parameter is managed already or has a hook that would see an incomplete gradient; a module has
            sparse gradients, is compiled or lazy; parameters share memory; the optimizer has other parameters, or does
            not treat each parameter alone.
    """
    check_shapes(model)
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule):
            raise ConfigError(
                f"{name or 'the model'} is compiled, and a compiled module would keep references to parameters that "
                "have left the device; leave torch.compile out"
            )
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"{name or type(module).__name__} has sparse gradients, which cannot be managed; make it with "
                "sparse=False"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ManagedParameter):
            raise ConfigError(f"{name} is managed already: release() its Gemini manager first")
        if parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{name} has a hook on its accumulated gradient, which would see only the contribution of one "
                "backward pass: remove the hook, and read gradients inside params_on_host() of the Gemini manager"
            )
    check_memory(model)
    if optimizer is not None:
        _check_known(optimizer, set(model.parameters()))
        check_steps_alone(optimizer)


def check_step(model: nn.Module, optimizer: Optimizer, store: ChunkStore) -> None:
    """Refuse a step that would leave out trainable parameters.

    Raises:
        ConfigError: The model or the optimizer has a new or newly trainable parameter since the manager was made.
    """
    remedy = "which the manager would never train: call release() and make a new manager"
    for name, parameter in model.named_parameters():
        chunk = store.chunk_of(parameter)
        if chunk is None:
            raise ConfigError(f"{name} was put into the model after Gemini(...), {remedy}")
        with untouched():
            is_trainable = parameter.requires_grad
        if is_trainable and not chunk.trainable:
            raise ConfigError(f"{name} was made to train after Gemini(...), {remedy}")
    _check_known(optimizer, {slot.parameter for chunk in store.chunks for slot in chunk.slots})


def _check_known(optimizer: Optimizer, known: set[torch.nn.Parameter]) -> None:
    if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer has parameters that the model does not have; make it from this model"
        )


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
