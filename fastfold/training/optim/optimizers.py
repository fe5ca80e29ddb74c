"""Optimizers and learning rate of group ``optim``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.large_batch import Lamb, Lars, initialize_state
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
        self.adam = _adamw(rest, optim)
        super().__init__([{"params": matrices, "lr": optim.muon_lr}, {"params": rest, "lr": optim.lr}], {})
        # Share groups and states, so that changes of rates and loaded states reach both optimizers.
        self.param_groups = self.muon.param_groups + self.adam.param_groups
        self.muon.state = self.adam.state = self.state

    def initialize(self) -> None:
        """Create the state of every parameter, as before the first step."""
        initialize_state(self.adam)
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
    if optim.name == "lamb":
        betas = (optim.beta1, optim.beta2)
        return Lamb(named, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)
    if optim.name == "lars":
        return Lars(
            named, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay, trust=optim.trust
        )
    return _adamw(named.values(), optim)


def _adamw(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """Create AdamW, which without weight decay, the default, is Adam."""
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(
        parameters, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay
    )


@dataclass(frozen=True)
class AlphaFoldSchedule:
    """Schedule with linear warm-up from zero, a constant rate, one decay, and optionally a final cosine.

    The supplement counts in samples: 0.128 million of warm-up, and a factor of 0.95 after 6.4 million. At its batch
    size of 128 these are the default 1,000 and 50,000 steps; for another batch size divide the samples by it.
    Fine-tuning starts without warm-up from half the rate.

    The schedule is stateless, so a resumed run has the rates of an uninterrupted one.

    Raises:
        ConfigError: A value is out of range.
    """

    base_lr: float = 1e-3  #: Rate after warm-up
    warmup_steps: int = 1000  #: Step at which the base rate is reached; 0 for none
    decay_after: int | None = 50_000  #: Last step before the decay, or None for no decay
    decay_factor: float = 0.95  #: Factor of all later rates
    #: Step at which a half cosine from the end of warm-up ends; None for no cosine. Not in the supplement, for small
    #: runs.
    total_steps: int | None = None
    final_fraction: float = 0.0  #: Share of the base rate at which the cosine ends

    def __post_init__(self) -> None:
        if not (self.base_lr > 0 and math.isfinite(self.base_lr)):
            raise ConfigError(f"the learning rate must be a number above 0, got {self.base_lr}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warm-up must take at least 0 steps, got {self.warmup_steps}")
        if not 0 < self.decay_factor <= 1:
            raise ConfigError(f"the decay factor must be above 0 and at most 1, got {self.decay_factor}")
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"the cosine's final fraction must be in 0 to 1, got {self.final_fraction}")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"the cosine ends at step {self.total_steps}, but warm-up lasts until step {self.warmup_steps}; "
                "lengthen the one or shorten the other"
            )

    def lr(self, step: int) -> float:
        """Return the learning rate of an optimisation step, counted from 1; 0 is for the rate before the first step."""
        lr = self.base_lr
        if step < self.warmup_steps:
            lr *= step / self.warmup_steps
        elif self.total_steps is not None:
            share = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
            lr *= self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * share))
        if self.decay_after is not None and step > self.decay_after:
            lr *= self.decay_factor
        return lr


def make_schedule(optim: OptimConfig) -> AlphaFoldSchedule:
    """Return the learning rates that group ``optim`` configures.

    Raises:
        ConfigError: A value is out of range.
    """
    return AlphaFoldSchedule(
        optim.lr,
        warmup_steps=optim.warmup_steps,
        decay_after=optim.decay_after,
        decay_factor=optim.decay_factor,
        total_steps=optim.cosine_steps,
        final_fraction=optim.final_fraction,
    )
