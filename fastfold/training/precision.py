"""Reduced precision put on a network from outside: bfloat16 in the trunk, float32 everywhere else."""

from __future__ import annotations

import torch
from torch import nn

from fastfold.evoformer.model import AlphaFold


def autocast_trunk(model: AlphaFold, device_type: str, *, cache: bool = True) -> None:
    """Run embedders, extra MSA stack and Evoformer under bfloat16 autocast, in place.

    Parameters stay in float32, and so do structure module, heads and losses, which take the trunk's results in
    float32; the operators keep the statistics of softmax and normalisation in float32 themselves.

    Args:
        model: The network.
        device_type: Where it runs, ``cpu`` or ``cuda``.
        cache: Keep the bfloat16 copies of parameters until the end of the trunk; not where parameters come and go.
    """
    exact: tuple[nn.Module, ...] = (model.structure_module, model.heads)
    for module in model.children():
        if module not in exact:
            wrap = torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=cache)
            module.forward = wrap(module.forward)
