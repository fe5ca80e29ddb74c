"""The optimizers of group ``optim``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from fastfold.parallel import Lamb, Lars
from fastfold.training.config import OptimConfig


def make_optimizer(optim: OptimConfig, named: Mapping[str, nn.Parameter]) -> Optimizer:
    """The optimizer that a run is configured with.

    Args:
        optim: Group ``optim``.
        named: The parameters by name, as :meth:`fastfold.parallel.Parallel.optimizer` hands them out.
    """
    betas = (optim.beta1, optim.beta2)
    if optim.name == "lamb":
        return Lamb(named, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)
    if optim.name == "lars":
        return Lars(
            named,
            lr=optim.lr,
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
            trust=optim.trust,
        )
    # Decay of the weights apart from the moments, as in AdamW; at 0, the default, it is Adam.
    return torch.optim.AdamW(
        named.values(), lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
