"""Gradients of one optimisation step: clipped sample by sample, added up over samples and processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fastfold.training.world import World


class SampleGradients:
    """Adds up the gradients of a step's samples, each clipped on its own (supplement, section 1.11.3).

    Args:
        parameters: The parameters that train.
        clip: Largest norm of one sample's gradient; longer ones are scaled down to it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], clip: float) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._clip = clip
        self._totals: list[Tensor] | None = None

    def add_sample(self) -> float:
        """Take the parameters' ``grad`` as one sample's, and leave None in its place.

        Returns:
            The sample's gradient norm before clipping; not finite if an element is not, and then nothing is
            added.
        """
        grads = [p.grad for p in self._parameters]
        present = [g for g in grads if g is not None]
        norms = torch._foreach_norm(present) if present else []
        norm = torch.stack([n.float() for n in norms]).norm() if norms else torch.zeros(())
        if bool(norm.isfinite()):
            if self._totals is None:
                self._totals = [torch.zeros_like(p) for p in self._parameters]
            factor = (self._clip / norm.clamp(min=1e-12)).clamp(max=1.0)
            for total, grad in zip(self._totals, grads, strict=True):
                if grad is not None:
                    total.add_(grad * factor)
        for p in self._parameters:
            p.grad = None
        return float(norm)

    def finish(self, world: World, samples: int) -> float:
        """Put the mean over ``samples`` samples of all processes into ``grad``, and start over.

        Returns:
            The norm of that mean.
        """
        totals = self._totals if self._totals is not None else [torch.zeros_like(p) for p in self._parameters]
        self._totals = None
        world.sum(totals)
        for p, total in zip(self._parameters, totals, strict=True):
            p.grad = total.div_(samples)
        return float(torch.stack([total.float().norm() for total in totals]).norm())

    def discard(self) -> None:
        """Forget what was added."""
        self._totals = None
        for p in self._parameters:
            p.grad = None
