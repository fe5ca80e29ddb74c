"""Losses of designs by several processes that share each complex."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastfold.evoformer.model import AlphaFold
from fastfold.inference.design.evaluate import Evaluation, Evaluator
from fastfold.inference.design.joint import planned_evaluator
from fastfold.inference.design.optimise import DesignConfig
from fastfold.inference.design.task import DesignTask
from fastfold.inference.distributed import DistributedFolder
from fastfold.inference.planning.gradient_plan import GradientPlan

if TYPE_CHECKING:
    from fastfold.parallel.distributed import DistributedContext


class SharedEvaluator(Evaluator):
    """Evaluator of the first process, whose losses and gradients all processes compute together.

    Arguments and errors are those of :func:`~fastfold.inference.design.joint.planned_evaluator`; a ConfigError as well
    if a part of the task cannot be sent to other processes.
    """

    def __init__(
        self,
        task: DesignTask,
        config: DesignConfig,
        plans: Sequence[GradientPlan | None],
        models: Sequence[AlphaFold],
        distributed: DistributedFolder,
    ) -> None:
        for one in task.complexes:
            _ = one.template_features  # read here, because other machines may lack the files
        own, self._call = distributed.together(partial(_evaluator, task, config, plans), models)
        vars(self).update(vars(own))

    def __call__(self, *arguments: Any, **settings: Any) -> Evaluation:
        """Compute the losses, and their gradient, on all processes; arguments as those of :class:`Evaluator`."""
        found: Evaluation = self._call(*arguments, **settings)
        return found


def _evaluator(
    task: DesignTask,
    config: DesignConfig,
    plans: Sequence[GradientPlan | None],
    models: Sequence[AlphaFold],
    context: DistributedContext,
) -> Evaluator:
    return planned_evaluator(task, config, plans, models, context.mesh.group("dap"))
