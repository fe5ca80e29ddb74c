"""Optimizers of group ``optim``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.large_batch import Lamb, Lars, initialise_state
from fastfold.training.config import OptimConfig

_MOST_ELEMENTS = 1 << 24  # of a batch: 64 MiB of float32


def orthogonalise(
    matrices: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Bring the singular values of matrices near 1 by a quintic Newton-Schulz iteration (Jordan et al. 2024).

    The matrices are ``[B, R, C]`` with ``R <= C``. The coefficients are those of the first, third and fifth power;
    ``eps`` is the lower bound of the Frobenius norm in the division.

    Returns:
        ``[B, R, C]``, in bfloat16 on GPUs and in float32 on CPUs, because many CPUs are slow in bfloat16.
    """
    first, third, fifth = coefficients
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)  # bounds all singular values by 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x


class Muon(torch.optim.Muon):
    """PyTorch's Muon, faster for networks of many small matrices.

    Arguments and state are the same, and steps are equal up to rounding. PyTorch orthogonalises one matrix after
    another, in bfloat16 on all devices. Updates are scaled to the size of AdamW's (``match_rms_adamw``).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all matrices that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter, gradient, momentum in zip(parameters, gradients, momenta, strict=True):
                momentum.lerp_(gradient, 1 - group["momentum"])
                wide = parameter.shape[0] <= parameter.shape[1]
                update = gradient.lerp(momentum, group["momentum"])  # Nesterov's
                alike[tuple(sorted(parameter.shape))].append(
                    (parameter, update) if wide else (parameter.mT, update.mT)
                )
            for (rows, columns), pairs in alike.items():
                most = max(1, _MOST_ELEMENTS // (rows * columns))
                for start in range(0, len(pairs), most):
                    self._update(group, pairs[start : start + most])

    @staticmethod
    def _update(group: dict, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Step matrices ``[R, C]`` of one shape, ``R <= C``, by their updates."""
        updates = orthogonalise(
            torch.stack([update for _, update in pairs]),
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            eps=group["eps"],
        )
        rate = 0.2 * math.sqrt(updates.shape[-1]) * group["lr"]
        for (parameter, _), update in zip(pairs, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


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

    The parameters are those of :meth:`fastfold.parallel.Parallel.optimizer`.
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
