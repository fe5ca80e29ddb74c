"""Muon that orthogonalises matrices of one shape in batches."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

_MOST_ELEMENTS = 1 << 24  # of a batch: 64 MiB of float32


def orthogonalise(
    matrices: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Bring the singular values of matrices near 1 by a quintic Newton-Schulz iteration (Jordan et al. 2024).

    Args:
        matrices: ``[B, R, C]`` with ``R <= C``.
        coefficients: Coefficients of the first, third and fifth power.
        steps: Number of iterations.
        eps: Lower bound of the Frobenius norm in the division.

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
