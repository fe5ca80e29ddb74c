"""The best plans for a workload on a number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fastfold.errors import ConfigError
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.cost_model import Cost, imbalance, least_seconds, step_cost
from fastfold.parallel.planner.hardware import Rates, rates
from fastfold.parallel.planner.workload import Workload, divisors
from fastfold.utils.units import GIB


def candidates(workload: Workload, gpus: int) -> Iterator[ParallelPlan]:
    """Yield every plan of exactly this number of ranks that the workload allows.

    Every replica has at least one sample. ZeRO's stages 2 and 3 are not combined with pipeline stages, which sum the
    gradients of their micro-batches.
    """
    for inner in divisors(gpus):
        for layout in workload.layouts(inner):
            for pp in divisors(gpus // inner):
                dp = gpus // inner // pp
                if dp * workload.rows(layout) > workload.samples or pp > workload.stages:
                    continue
                plan = replace(layout, dp=dp, pp=pp)
                for zero in workload.zero if plan.replicas > 1 else (0,):
                    if pp == 1 or zero < 2:
                        yield replace(plan, zero=zero)


def best_plans(
    workload: Workload,
    *,
    gpus: int,
    gpu: str | Rates,
    count: int = 5,
    progress: Callable[[str], None] | None = None,
) -> list[Cost]:
    """Return the fastest plans that fit into memory, the fastest first; of each only its fastest ZeRO stage.

    Groups of ``tp`` and ``dap`` stay within a machine unless no plan fits so (``across_machines``).

    Args:
        workload: The training step.
        gpus: Number of GPUs.
        gpu: Their name, one of :data:`fastfold.parallel.planner.hardware.ACCELERATORS`, or rates
            (:func:`fastfold.parallel.planner.hardware.rates`).
        count: Maximum number of plans.
        progress: Called with a line for each layout that is traced.

    Raises:
        ConfigError: The GPU is unknown, no plan has a sample for every replica, or none fits into memory. The last
            message says how many bytes are missing.
    """
    if gpus < 1:
        raise ConfigError(f"expected at least one GPU, found {gpus}")
    speeds = gpu if isinstance(gpu, Rates) else rates(gpu)
    fitting: dict[ParallelPlan, Cost] = {}
    smallest: Cost | None = None
    every = [
        replace(plan, across_machines=plan.crosses_machines(speeds.sheet.per_machine))
        for plan in candidates(workload, gpus)
    ]
    # Layers' messages stay within a machine, unless only plans across machines fit.
    for plan in sorted(every, key=lambda plan: plan.across_machines):
        if plan.across_machines and any(not kind.across_machines for kind in fitting):
            break
        layout = plan.of_sample
        if layout not in workload.traced:
            if len(fitting) >= count and not _may_be_better(workload, plan, speeds, fitting, count):
                continue
            if progress is not None:
                progress(f"tracing {workload.name} on {layout}")
        for checkpointing in (False, True):
            cost = step_cost(workload, plan, speeds, checkpointing=checkpointing)
            if smallest is None or cost.total_memory < smallest.total_memory:
                smallest = cost
            if cost.total_memory > speeds.usable_memory:
                continue
            kind = replace(plan, zero=0)
            if kind not in fitting or _order(cost) < _order(fitting[kind]):
                fitting[kind] = cost
    if smallest is None:
        raise ConfigError(
            f"{gpus} GPUs cannot share {workload.samples} samples of {workload.name} so that each has work; take fewer "
            "GPUs, a larger batch, or a number of GPUs with more divisors"
        )
    if not fitting:
        over = smallest.total_memory - speeds.usable_memory
        raise ConfigError(
            f"{workload.name} ({workload.description}) fits into no plan of {gpus} x {speeds.sheet.name}: the leanest "
            f"({smallest.plan}, zero {smallest.plan.zero}) needs {smallest.total_memory / GIB:,.1f} GiB per GPU, "
            f"{over / GIB:,.1f} GiB more than the {speeds.usable_memory / GIB:,.1f} GiB that may be filled; take "
            "more or larger GPUs, or smaller crops"
        )
    return sorted(fitting.values(), key=_order)[:count]


def _may_be_better(
    workload: Workload, plan: ParallelPlan, speeds: Rates, found: dict[ParallelPlan, Cost], count: int
) -> bool:
    """Return True if tracing a layout can change the answer; the check is fast, tracing is not."""
    # A pipeline divides launches by its stages, which no layout does.
    samples = workload.samples / plan.dp
    least = least_seconds(workload, plan.ranks // plan.dp, samples, speeds) / plan.pp
    return least * imbalance(plan.ranks, speeds) < sorted(cost.seconds for cost in found.values())[count - 1]


def _order(cost: Cost) -> tuple[float, float]:
    return cost.seconds, cost.total_memory


def overrides(cost: Cost) -> list[str]:
    """Return the plan as Hydra overrides of ``fastfold train``."""
    default = ParallelPlan().to_dict()
    found = [
        f"parallel.{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in cost.plan.to_dict().items()
        if value != default[name]
    ]
    return [*found, f"memory.checkpointing={str(cost.checkpointing).lower()}"]
