"""Plan the gradients of a design before it runs, within the memory of its device and host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import precision_of
from fastfold.inference.config import InferConfig
from fastfold.inference.design.task import DesignTask
from fastfold.inference.distributed import DistributedFolder
from fastfold.inference.folding.gradients import CHECKPOINTED, GradientRun
from fastfold.inference.planning.fit import FoldMemory
from fastfold.inference.planning.gradient_plan import (
    GradientPlan,
    GradientPlanner,
    gradient_run,
    plan_gradients,
)
from fastfold.inference.planning.planner import parameter_bytes
from fastfold.parallel.comm.groups import Group
from fastfold.utils.units import GIB


def plan_design(
    task: DesignTask,
    models: Sequence[AlphaFold],
    infer: InferConfig,
    say: Callable[[str], None],
    distributed: DistributedFolder | None = None,
) -> GradientPlan | None:
    """Plan the gradients of a design, or raise InputError, which names what makes them fit.

    The budget is that of ``infer``, by default the free memory. Without a budget, gradients of a short target are not
    planned. ``say`` gets a line if block inputs leave the device.
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
        templates=_templates(task),
    )
    # The planner counts the parameters of one network.
    plan = plan_gradients(planner, budget - here + parameter_bytes(model), name=task.name)
    if plan.policy.host:
        say(
            f"{task.name}: a gradient takes {plan.peak / GIB:,.1f} GiB of {device.type}, and "
            f"{plan.policy.host / GIB:,.1f} GiB of the host's memory"
        )
    return plan


def design_gradients(
    task: DesignTask, plan: GradientPlan | None, device: torch.device, group: Group | None = None
) -> GradientRun:
    """Return the passes of a design by a plan, or by its length alone without one.

    ``group`` are the ranks that share the target; None for one.
    """
    return gradient_run(plan, len(task.source), device, group, _templates(task))


def _templates(task: DesignTask) -> tuple[int, ...] | None:
    """Return the indices of the templates that a monomer network reads; None for all."""
    return () if task.templates is None else None
