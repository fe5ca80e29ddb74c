"""Refuse models and optimizers that cannot be managed correctly, before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.memory.gemini.chunk_store import ChunkStore
from fastfold.memory.gemini.managed_parameter import ManagedParameter
from fastfold.memory.gemini.optimizer.probe import check_steps_alone


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
            sparse gradients; the optimizer has other parameters, or does not treat each parameter alone.
    """
    for name, module in model.named_modules():
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
        if parameter.requires_grad and not chunk.trainable:
            raise ConfigError(f"{name} was made to train after Gemini(...), {remedy}")
    _check_known(optimizer, {slot.parameter for chunk in store.chunks for slot in chunk.slots})


def _check_known(optimizer: Optimizer, known: set[torch.nn.Parameter]) -> None:
    if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer has parameters that the model does not have; make it from this model"
        )
