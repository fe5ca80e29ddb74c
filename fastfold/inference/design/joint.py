"""One sequence for several targets, and against off-targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastfold.evoformer.inputs import Relaxation
from fastfold.inference.design.evaluate import Evaluation, Evaluator


class JointEvaluator(Evaluator):
    """Mean loss of a binder with several targets, plus the mean loss of contacts with off-targets.

    Every target is a complex of its own. Structure, pLDDT and the task are those of the first target.

    Args:
        arguments: Those of :class:`Evaluator` for the first target.
        others: Evaluators of further targets.
        avoided: Evaluators of off-targets.
        settings: Those of :class:`Evaluator` for the first target.
    """

    def __init__(
        self, *arguments: Any, others: Sequence[Evaluator], avoided: Sequence[Evaluator], **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._others, self._avoided = list(others), list(avoided)

    def __call__(
        self,
        parameters: Tensor,
        relaxation: Relaxation,
        *,
        networks: Sequence[int] | None = None,
        recycles: int | None = None,
        seed: int = 0,
        dropout: bool = False,
        gradient: bool = True,
    ) -> Evaluation:
        """Compute the losses, and their gradient; arguments as those of :class:`Evaluator`."""
        settings: dict[str, Any] = {
            "networks": networks,
            "recycles": recycles,
            "seed": seed,
            "dropout": dropout,
            "gradient": gradient,
        }
        first = super().__call__(parameters, relaxation, **settings)
        targets = [first, *(one(parameters, relaxation, **settings) for one in self._others)]
        avoided = [one(parameters, relaxation, **settings) for one in self._avoided]
        losses = {
            name: _mean([one.losses[name] for one in group])
            for group in (targets, avoided)
            if group
            for name in group[0].losses
        }
        return replace(
            first,
            loss=sum(_mean([one.loss for one in group]) for group in (targets, avoided) if group),
            losses=losses,
            gradient=_gradient(targets, avoided) if gradient else None,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _gradient(*groups: Sequence[Evaluation]) -> Tensor:
    """Return the sum over groups of the mean gradient."""
    means = [
        torch.stack([one.gradient for one in group if one.gradient is not None]).mean(0)
        for group in groups
        if group
    ]
    return torch.stack(means).sum(0)
