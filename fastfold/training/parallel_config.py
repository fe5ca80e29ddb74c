"""Group ``parallel`` of the configuration, and the plan that it makes for the processes that were started."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan


@dataclass
class ParallelConfig:
    """Group ``parallel``: how the processes that torchrun started share the work.

    The product of ``dp`` and ``dap`` is their number. See :class:`fastfold.parallel.ParallelPlan`, which checks them.

    Attributes:
        dp: Groups that share each step's samples (data parallelism), or null for as many as there are processes for.
        zero: What is sharded over the processes: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too (only
            without ``dp``: each sample's gradient is clipped).
        pp: Pipeline stages; other models than this network have them.
        tp: Ranks of a tensor parallel group; other models than this network have them.
        tp_mode: ``1d``, ``2d``, ``2.5d`` or ``3d``.
        tp_depth: Depth of ``2.5d``.
        sp: Ranks over which a sequence is sharded; other models than this network have them.
        dap: Processes that share one sample, whose MSA and pair they shard.
        dap_mode: ``axial`` (along one axis) or ``grid`` (the pair in blocks).
        dap_rows: Rows of that grid; 0 for a square one.
        auto: Take the fastest plan by the cost model of ``fastfold plan`` instead of the axes above.
        gpu: With ``auto``: which GPU to plan for, or null for the one that is there.
    """

    dp: int | None = None
    zero: int = 0
    pp: int = 1
    tp: int = 1
    tp_mode: str = "1d"
    tp_depth: int = 1
    sp: int = 1
    dap: int = 1
    dap_mode: str = "axial"
    dap_rows: int = 0
    auto: bool = False
    gpu: str | None = None


def plan_of(parallel: ParallelConfig, processes: int) -> ParallelPlan:
    """The plan of a run; checked before any process talks to another.

    Args:
        parallel: Group ``parallel``; without ``dp`` data parallelism takes what the other axes leave.
        processes: Started by torchrun.

    Raises:
        ConfigError: The plan is impossible, needs another number of processes, or is not one for training.
    """
    values = {axis.name: getattr(parallel, axis.name) for axis in fields(ParallelPlan) if axis.name != "dp"}
    dp, plan = parallel.dp, ParallelPlan(**values)
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
