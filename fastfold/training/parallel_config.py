"""Group ``parallel`` of the configuration, and its plan for the started processes."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan
from fastfold.training.bounds import bounded

# Hydra needs a mutable class, so the fields of the frozen plan are copied.
_Axes: Any = make_dataclass("_Axes", [(axis.name, axis.type, axis.default) for axis in fields(ParallelPlan)])


@dataclass
class ParallelConfig(_Axes):
    """Group ``parallel``: division of the work between the processes that torchrun started.

    The other fields are the axes of :class:`fastfold.parallel.ParallelPlan`, which documents and checks them. The
    product of ``dp`` and ``dap`` is the number of processes. ``pp``, ``tp`` and ``sp`` are for other models than this
    network. ``zero=3`` excludes ``dp``, because each sample's gradient is clipped.
    """

    #: Number of groups that share each step's samples (data parallelism), or null for all remaining processes
    dp: int | None = None
    auto: bool = False  #: Use the fastest plan by the cost model of ``fastfold plan`` instead of these axes
    gpu: str | None = None  #: GPU to plan for with ``auto``, or null for this machine's
    #: Time limit for processes that wait for each other, at the start and in every collective
    timeout_minutes: float = bounded(30.0, above=0)


def axes_of(parallel: ParallelConfig) -> ParallelPlan:
    """Return the plan of a group's axes, without the data parallel axis.

    Raises:
        ConfigError: An axis is invalid.
    """
    if parallel.dp is not None and parallel.dp < 1:
        raise ConfigError(f"parallel.dp must be at least 1, got {parallel.dp}")
    values = {axis.name: getattr(parallel, axis.name) for axis in fields(ParallelPlan) if axis.name != "dp"}
    return ParallelPlan(**values)


def plan_of(parallel: ParallelConfig, processes: int) -> ParallelPlan:
    """Return the checked plan of a run, before any communication.

    Without ``dp``, data parallelism uses the remaining of the processes that torchrun started.

    Raises:
        ConfigError: The plan is invalid, needs another number of processes, or is not for training.
    """
    dp, plan = parallel.dp, axes_of(parallel)
    for name in ("tp", "sp"):
        if getattr(plan, name) > 1:
            raise ConfigError(
                f"parallel.{name}={getattr(plan, name)}: this network is sharded by parallel.dap (dap_mode axial or "
                f"grid); tensor and sequence parallelism are for other models, see examples/gpt"
            )
    if plan.pp > 1:
        raise ConfigError(
            f"parallel.pp={plan.pp}: fastfold train clips each sample's gradient, but a pipeline sums them over its "
            "microbatches; use dp, dap and zero"
        )
    if dp is None:
        dp, rest = divmod(processes, plan.ranks)
        if rest or not dp:
            raise ConfigError(f"{plan} = {plan.ranks} ranks do not divide the {processes} started processes")
    plan = replace(plan, dp=dp)
    try:
        plan.check_ranks(processes)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; run torchrun --nproc-per-node {plan.ranks} -m fastfold train ..."
        ) from None
    if plan.zero == 3 and plan.dp > 1:
        raise ConfigError(
            f"parallel.zero=3 with dp={plan.dp}: it sums gradients over samples while they are computed, but each "
            "sample's is clipped (optim.clip); use zero=2, or zero=3 with only dap"
        )
    return plan
