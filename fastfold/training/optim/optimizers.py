"""Optimizers of group ``optim``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.large_batch import Lamb, Lars, initialise_state
from fastfold.training.config import OptimConfig
from fastfold.training.optim.muon import Muon

MUON_PARTS = ("evoformer.", "extra_msa_stack.", "structure_module.")
"""Prefixes of the names of parameters whose matrices Muon steps."""


class MuonWithAdam(Optimizer):
    """Optimizer with Muon (Jordan et al. 2024) for some matrices and AdamW for all other parameters.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that their rates are
    comparable.

    Raises:
        ConfigError: The parameters are shards, without a matrix.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], optim: OptimConfig) -> None:
        matrices = [p for name, p in named.items() if p.dim() == 2 and name.startswith(MUON_PARTS)]
        chosen = set(matrices)
        rest = [p for p in named.values() if p not in chosen]
        if not matrices or not rest:
            raise ConfigError("optim.name=muon steps whole matrices of a whole network: set parallel.zero=0")
        self.muon = Muon(
            matrices,
            lr=optim.muon_lr,
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adam = torch.optim.AdamW(
            rest,
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        super().__init__([{"params": matrices, "lr": optim.muon_lr}, {"params": rest, "lr": optim.lr}], {})
        # Share groups and states, so that changes of rates and loaded states reach both optimizers.
        self.param_groups = self.muon.param_groups + self.adam.param_groups
        self.muon.state = self.adam.state = self.state

    def initialise(self) -> None:
        """Create the state of every parameter, as before the first step."""
        initialise_state(self.adam)
        for group in self.muon.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        assert closure is None
        self.muon.step()
        self.adam.step()


def make_optimizer(optim: OptimConfig, named: Mapping[str, nn.Parameter]) -> Optimizer:
    """Create the optimizer that group ``optim`` configures.

    Args:
        optim: Group ``optim``.
        named: The parameters by name, from :meth:`fastfold.parallel.Parallel.optimizer`.
    """
    if optim.name == "muon":
        return MuonWithAdam(named, optim)
    betas = (optim.beta1, optim.beta2)
    if optim.name == "lamb":
        return Lamb(named, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)
    if optim.name == "lars":
        return Lars(
            named, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay, trust=optim.trust
        )
    # AdamW without weight decay, the default, is Adam.
    return torch.optim.AdamW(
        named.values(), lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
