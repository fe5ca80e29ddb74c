"""Group ``parallel`` of the configuration, and the plan that it makes for the processes that were started."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan
from fastfold.training.bounds import bounded

# The axes of a plan, each with its type and default, in a class whose fields can be set: Hydra fills it.
_Axes: Any = make_dataclass("_Axes", [(axis.name, axis.type, axis.default) for axis in fields(ParallelPlan)])


@dataclass
class ParallelConfig(_Axes):
    """Group ``parallel``: how the processes that torchrun started share the work.

    Its other fields are the axes of :class:`fastfold.parallel.ParallelPlan`, which says what they are and checks them.
    The product of ``dp`` and ``dap`` is the number of processes. ``pp``, ``tp`` and ``sp`` are for other models than
    this network, and ``zero=3`` goes without ``dp``, because each sample's gradient is clipped.

    Attributes:
        dp: Groups that share each step's samples (data parallelism), or null for as many as there are processes for.
        auto: Take the fastest plan by the cost model of ``fastfold plan`` instead of these axes.
        gpu: GPU to plan for with ``auto``, or null for the one that is there.
        timeout_minutes: How long processes wait for each other, at the beginning and in every collective.
    """

    dp: int | None = None
    auto: bool = False
    gpu: str | None = None
    timeout_minutes: float = bounded(30.0, above=0)


def axes_of(parallel: ParallelConfig) -> ParallelPlan:
    """The axes of a group, without how many processes share the samples.

    Raises:
        ConfigError: They are impossible.
    """
    if parallel.dp is not None and parallel.dp < 1:
        raise ConfigError(f"parallel.dp must be at least 1, got {parallel.dp}")
    values = {axis.name: getattr(parallel, axis.name) for axis in fields(ParallelPlan) if axis.name != "dp"}
    return ParallelPlan(**values)


def plan_of(parallel: ParallelConfig, processes: int) -> ParallelPlan:
    """The plan of a run; checked before any process talks to another.

    Args:
        parallel: Group ``parallel``; without ``dp`` data parallelism takes what the other axes leave.
        processes: Started by torchrun.

    Raises:
        ConfigError: The plan is impossible, needs another number of processes, or is not one for training.
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
            f"parallel.pp={plan.pp}: fastfold train clips each sample's gradient, which a pipeline adds up over its "
            "microbatches; use dp, dap and zero"
        )
    if dp is None:
        dp, rest = divmod(processes, plan.ranks)
        if rest or not dp:
            raise ConfigError(f"{plan} = {plan.ranks} ranks do not divide the {processes} that were started")
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
            "sample's is clipped (optim.clip); use zero=2, or zero=3 with dap alone"
        )
    return plan
