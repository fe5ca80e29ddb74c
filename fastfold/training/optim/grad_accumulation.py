"""Gradients of one optimisation step: clipped per sample, summed over samples and processes."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from fastfold.parallel.data_parallel.kept_gradients import ReducedGradients
from fastfold.utils.device import reads_are_free


class SampleGradients:
    """Sum of the gradients of a step's samples, each clipped separately (supplement, section 1.11.3).

    A gradient with a norm over ``clip`` is scaled down to it.
    """

    def __init__(self, gradients: ReducedGradients, clip: float) -> None:
        self._gradients = gradients
        self._clip = clip
        self._totals: list[Tensor] | None = None

    def overlapped(self) -> AbstractContextManager[None]:
        """Return a context for a sample's backward pass, in which its ranks sum the gradient meanwhile."""
        return self._gradients.overlapped()

    def add_sample(self) -> Tensor:
        """Add the parameters' ``grad`` of one sample to the sum, and set it to None.

        A collective of the ranks that work on this sample. Gradients with elements that are not finite are not added.
        The result is the sample's gradient norm before clipping, a float64 scalar. On a GPU the host does not wait for
        it.
        """
        sample = self._gradients.take_sample()
        norm = self._gradients.squared_norm(sample).sqrt()
        free = reads_are_free(norm.device)
        if free and not bool(norm.isfinite()):
            return norm
        factor = (self._clip / norm.clamp(min=1e-12)).clamp(max=1.0)
        scaled = [x.mul_(factor.to(x.dtype)) for x in sample]
        if not free:
            hidden = ~norm.isfinite()
            scaled = [x.masked_fill_(hidden, 0.0) for x in scaled]
        if self._totals is None:
            self._totals = scaled
        else:
            for total, x in zip(self._totals, scaled, strict=True):
                total.add_(x)
        return norm

    def finish(self, samples: int) -> Tensor:
        """Write the mean over ``samples`` samples of all ranks to ``grad``, and reset the sum (a collective).

        The result is the norm of the mean, a float64 scalar.
        """
        totals = self._totals if self._totals is not None else self._gradients.zeros()
        self._totals = None
        self._gradients.finish([total.div_(samples) for total in totals])
        return self._gradients.gradient_square().sqrt()

    def discard(self) -> None:
        """Discard the sum and the gradients."""
        self._totals = None
        for parameter in self._gradients.parameters.values():
            parameter.grad = None
