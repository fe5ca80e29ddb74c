"""Activation checkpointing of any model's blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fastfold.parallel.data_parallel.units import listed_modules


def checkpointable_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost members of each ``nn.ModuleList`` of a model by path, which may be recomputed.

    Empty if a second forward pass would change the running statistics of a norm.
    """
    if any(isinstance(x, _NormBase) and x.track_running_stats for x in model.modules()):
        return {}
    listed = {id(block) for block in listed_modules(model)}
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if id(module) in listed and not is_inside and type(module).forward is not nn.Module.forward:
            found[path] = module
    return found


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep only the inputs of a model's blocks for the backward pass, and recompute the rest.

    Models of Hugging Face switch it on themselves, and their caches of keys off.
    """
    foreign: Any = model
    if getattr(foreign, "supports_gradient_checkpointing", False):
        foreign.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for block in checkpointable_blocks(model).values():
        # A copy of the block runs the copy's layers, unlike a bound method.
        block.forward = partial(checkpoint, type(block).forward, block, use_reentrant=False)
