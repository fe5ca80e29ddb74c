"""Losses of one sequence for its targets and against off-targets, their plan, and their division among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastfold.errors import ConfigError
from fastfold.evoformer.inputs import Relaxation
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import precision_of
from fastfold.inference.config import InferConfig
from fastfold.inference.distributed import DistributedFolder
from fastfold.inference.folding.gradients import CHECKPOINTED
from fastfold.inference.planning.fit import FoldMemory
from fastfold.inference.planning.gradient_plan import GradientPlan, GradientPlanner, plan_gradients
from fastfold.inference.planning.planner import parameter_bytes
from fastfold.parallel.distributed import DistributedContext
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.evaluate import Evaluation, Evaluator, design_gradients, uniform_bias
from fastfold.products.design.limits import limit_weights
from fastfold.products.design.passes import PAIR_OUTPUTS
from fastfold.products.design.tasks.task import DesignTask
from fastfold.utils.units import GIB

_AVOID = "avoid"


class JointEvaluator(Evaluator):
    """Mean loss of a binder with several targets, plus the mean loss of contacts with off-targets.

    Every target is a complex of its own, with an evaluator in ``others`` or ``avoided``. Structure, pLDDT, the task and
    all other arguments are those of the first target.
    """

    def __init__(
        self, *arguments: Any, others: Sequence[Evaluator], avoided: Sequence[Evaluator], **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._others, self._avoided = list(others), list(avoided)

    def __call__(
        self, parameters: Tensor, relaxation: Relaxation, *, gradient: bool = True, **settings: Any
    ) -> Evaluation:
        settings["gradient"] = gradient
        first = super().__call__(parameters, relaxation, **settings)
        targets = [first, *(one(parameters, relaxation, **settings) for one in self._others)]
        avoided = [one(parameters, relaxation, **settings) for one in self._avoided]
        groups = [group for group in (targets, avoided) if group]
        gradients = [[one.gradient for one in group if one.gradient is not None] for group in groups]
        total = torch.stack([torch.stack(group).mean(0) for group in gradients]).sum(0) if gradient else None
        return replace(
            first,
            loss=sum(_mean([one.loss for one in group]) for group in groups),
            losses={
                name: _mean([one.losses[name] for one in group])
                for group in groups
                for name in group[0].losses
            },
            gradient=total,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def planned_evaluator(
    task: DesignTask,
    config: DesignConfig,
    plans: Sequence[GradientPlan | None],
    models: Sequence[AlphaFold],
    context: DistributedContext | None = None,
) -> Evaluator:
    """Return the losses of a task with the weights of its protocol and of the settings.

    ``plans`` has the plan of the gradients of each of its complexes, None for those without a memory limit. The ranks
    of ``context`` share each complex. A ConfigError tells that ``avoid`` needs off-targets, or see :class:`Evaluator`.
    """
    weights = {**task.weights, **limit_weights(config.limits), **config.weights}
    settings: dict[str, Any] = {
        "recycles": config.recycles,
        "recycle_mode": config.recycle_mode,
        "bias": uniform_bias(config.forbid),
    }
    limited = {**settings, "limits": config.limits}
    if _AVOID in config.weights and not task.avoided:
        raise ConfigError("the loss avoid needs off-targets; give them with `avoid`")
    device = next(models[0].parameters()).device
    group = None if context is None else context.mesh.group("dap")
    runs = [
        design_gradients(one, plan, device, group) for one, plan in zip(task.complexes, plans, strict=True)
    ]
    first, further, off = runs[0], runs[1 : 1 + len(task.others)], runs[1 + len(task.others) :]
    if not (task.others or task.avoided):
        return Evaluator(task, models, weights, gradients=first, **limited)
    avoid = {_AVOID: weights.pop(_AVOID, 1.0)}
    avoided = zip(task.avoided, off, strict=True) if avoid[_AVOID] else ()
    others = zip(task.others, further, strict=True)
    return JointEvaluator(
        task,
        models,
        weights,
        gradients=first,
        others=[Evaluator(one, models, weights, gradients=run, **limited) for one, run in others],
        avoided=[Evaluator(one, models, avoid, gradients=run, **settings) for one, run in avoided],
        **limited,
    )


def plan_design(
    task: DesignTask,
    models: Sequence[AlphaFold],
    infer: InferConfig,
    say: Callable[[str], None],
    distributed: DistributedFolder | None = None,
    *,
    kept: int = 0,
) -> GradientPlan | None:
    """Plan the gradients of a design, or raise InputError, which names what makes them fit.

    The budget is that of ``infer``, by default the free memory. Without a budget, gradients of a short target are not
    planned. ``say`` gets a line if block inputs leave the device. ``kept`` bytes of the budget are taken by states
    between passes.
    """
    residues, model = len(task.source), models[0]
    if residues < CHECKPOINTED and infer.budget is None:
        return None
    device = next(model.parameters()).device
    memory = (
        FoldMemory.here(device, host_memory=infer.host_bytes)
        if distributed is None
        else distributed.memory(host_memory=infer.host_bytes, offload_dir=None)
    )
    here = sum(map(parameter_bytes, models))
    budget = memory.free + here if infer.budget is None else infer.budget
    planner = GradientPlanner(
        model.config,
        residues,
        "bf16" if precision_of(model) == "bf16" else "fp32",
        device=device.type,
        ranks=1 if distributed is None else distributed.ranks,
        host_memory=memory.host if device.type == "cuda" else 0,
        templates=task.template_indices,
        msa=1 if task.copy_blocks is None or model.multimer else 1 + task.copies,
    )
    # The planner counts the parameters of one network.
    plan = plan_gradients(planner, budget - here - kept + parameter_bytes(model), name=task.name)
    if plan.policy.host:
        say(
            f"{task.name}: a gradient takes {plan.peak / GIB:,.1f} GiB of {device.type}, and "
            f"{plan.policy.host / GIB:,.1f} GiB of the host's memory"
        )
    return plan


def recycled_bytes(config: DesignConfig, residues: int, model: AlphaFold) -> int:
    """Return bytes that ``backprop`` and ``add_prev`` hold during a pass: states, and gradients or logits."""
    if config.recycle_mode not in ("backprop", "add_prev") or not config.recycles:
        return 0
    channels = model.config.model.embeddings_and_evoformer
    size = next(model.parameters()).element_size()
    state = residues * (residues * int(channels.pair_channel) + int(channels.msa_channel) + 37 * 3) * size
    if config.recycle_mode == "backprop":
        return (config.recycles + 1) * state
    bins = sum(int(model.config.model.heads[name].num_bins) for name in PAIR_OUTPUTS if name in model.heads)
    # The sum over passes, its gradient, and the mean.
    return config.recycles * state + 3 * residues * residues * bins * size


class SharedEvaluator(Evaluator):
    """Evaluator of the first process, whose losses and gradients all processes compute together.

    Arguments and errors are those of :func:`planned_evaluator`; a ConfigError as well
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
        own, self._call = distributed.together(partial(planned_evaluator, task, config, plans), models)
        vars(self).update(vars(own))

    def __call__(self, *arguments: Any, **settings: Any) -> Evaluation:
        """Compute the losses, and their gradient, on all processes; arguments as those of :class:`Evaluator`."""
        evaluation: Evaluation = self._call(*arguments, **settings)
        return evaluation
