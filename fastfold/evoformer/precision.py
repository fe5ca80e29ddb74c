"""Reduced precision put on a network from outside: bfloat16 in the trunk, float32 everywhere else."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.evoformer.model import AlphaFold

Precision = Literal["fp32", "bf16"]


def in_trunk(model: AlphaFold, child: nn.Module) -> bool:
    """Whether a child of the network runs in reduced precision: embedders and stacks, but not what follows them."""
    return child is not model.structure_module and child is not model.heads


def set_precision(model: AlphaFold, precision: Precision) -> AlphaFold:
    """Put the trunk into ``precision``, in place; structure module and heads stay in float32.

    Args:
        model: The network.
        precision: ``fp32``, or ``bf16`` for bfloat16 parameters and activations in embedders, extra MSA stack and
            Evoformer, whose softmax and normalisation statistics are float32 all the same.

    Raises:
        ConfigError: ``precision`` is neither.
    """
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"there is no precision {precision!r}; use fp32 or bf16")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for module in model.children():
        module.to(dtype if in_trunk(model, module) else torch.float32)
    return model


def autocast_trunk(model: AlphaFold, device_type: str, *, cache: bool = True) -> None:
    """Run embedders, extra MSA stack and Evoformer under bfloat16 autocast, in place.

    Parameters stay in float32, and so do structure module, heads and losses, which take the trunk's results in
    float32; the operators keep the statistics of softmax and normalisation in float32 themselves.

    Args:
        model: The network.
        device_type: Where it runs, ``cpu`` or ``cuda``.
        cache: Keep the bfloat16 copies of parameters until the end of the trunk; not where parameters come and go.
    """
    for module in model.children():
        if in_trunk(model, module):
            wrap = torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=cache)
            module.forward = wrap(module.forward)
