"""The best plans for a workload on a number of GPUs, and their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fastfold.errors import ConfigError
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.cost_model import Cost, least_seconds, step_cost
from fastfold.parallel.planner.hardware import LINKS, PUBLISHED_VALUES, WITHIN, Rates, rates
from fastfold.parallel.planner.workload import Workload
from fastfold.utils.units import GIB


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

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.parallel import best_plans
        >>> from fastfold.parallel.planner.workload import Repeat, Workload, standard_layouts
        >>> workload = Workload(
        ...     name="eight layers",
        ...     build=lambda mesh: nn.Sequential(nn.Linear(4096, 4096)),
        ...     loss=lambda model: model(torch.randn(1, 4096)).sum(),
        ...     samples=64,
        ...     stacks={"0": Repeat(8)},
        ...     layouts=standard_layouts(),
        ... )
        >>> [str(cost.plan) for cost in best_plans(workload, gpus=8, gpu="h100")]
        ['dp 8']
    """
    if gpus < 1:
        raise ConfigError(f"expected at least one GPU, found {gpus}")
    speeds = gpu if isinstance(gpu, Rates) else rates(gpu)
    fitting: dict[ParallelPlan, Cost] = {}
    smallest: Cost | None = None
    every = [
        replace(plan, across_machines=plan.crosses_machines(speeds.sheet.per_machine))
        for plan in workload.plans(gpus)
    ]
    # Layers' messages stay within a machine, unless only plans across machines fit.
    for plan in sorted(every, key=lambda plan: plan.across_machines):
        if plan.across_machines and any(not kind.across_machines for kind in fitting):
            break
        layout = plan.of_sample
        if layout not in workload.traced:
            # The bound is fast, tracing is not.
            known = sorted(cost.seconds for cost in fitting.values())
            if len(known) >= count and least_seconds(workload, plan, speeds) >= known[count - 1]:
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


def _order(cost: Cost) -> tuple[float, float]:
    return cost.seconds, cost.total_memory


def overrides(cost: Cost) -> list[str]:
    """Return the plan as Hydra overrides of ``fastfold train``."""
    default = ParallelPlan().to_dict()
    changed = [
        f"parallel.{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in cost.plan.to_dict().items()
        if value != default[name]
    ]
    return [*changed, f"memory.checkpointing={str(cost.checkpointing).lower()}"]


def plan_table(costs: Sequence[Cost]) -> str:
    """Format plans as a table with a line each, the best one first.

    Columns are number, time per step, memory per GPU, communication share, achieved rate per GPU and Hydra overrides.
    The rate counts the model's operations without recomputation. A time without measured rates is marked as
    uncalibrated.
    """
    rows = [("", "time/step", "memory/GPU", "communication", "TFLOP/s/GPU", "settings")]
    for number, cost in enumerate(costs, 1):
        rows.append(
            (
                str(number),
                step_text(cost),
                f"{cost.total_memory / GIB:.1f} GiB",
                f"{cost.communication_share:.1%}",
                f"{cost.model_flops / cost.seconds / cost.plan.ranks / 1e12:.3g}",
                " ".join(overrides(cost)),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def seconds_text(seconds: float) -> str:
    """Format a time with its unit, to three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def assumptions_text(rates: Rates, *, training: bool = True) -> str:
    """List the rates of a plan with their sources, and the assumptions; ``training`` adds its memory."""
    lines = [f"rates of {rates.sheet.name}:"]
    numbers = {f"matrix_rates.{dtype}": (rate / 1e12, "TFLOP/s") for dtype, rate in rates.matrix.items()}
    numbers |= {name: (getattr(rates, name) / 1e9, "GB/s") for name in LINKS}
    lines += [
        f"  {name.replace('matrix_rates.', 'matrix products in '):<28} {value:8.0f} {unit:<8} {rates.origin[name]}"
        for name, (value, unit) in numbers.items()
    ]
    assumed = rates.assumptions
    launches = f"{assumed.launch_seconds * 1e6:g} µs"
    if assumed.graphed:
        launches = f"a CUDA graph of a block's kernels no less than {launches} (fastfold train captures no graphs yet)"
    else:
        launches = f"no less than {launches} to be launched"
    lines.append(
        f"assumed: a kernel takes {assumed.kernel_seconds * 1e6:g} µs in addition to its work, {launches}, a "
        f"message {assumed.latency_seconds * 1e6:g} µs in addition to its bytes; {assumed.hidden_share:.0%} of the "
        "communication inside the model overlaps with computation; ranks wait for the slowest, which takes "
        f"{assumed.imbalance:g} times the mean; {rates.sheet.per_machine} GPUs in a machine"
        + (f"; {assumed.memory_share:.0%} of a GPU's memory may be filled" if training else "")
    )
    checked = (
        f"the constants are fitted to published results of other programs on A100 and H100 ({PUBLISHED_VALUES} values, "
        f"each within {WITHIN:g} times)"
        if training
        else "the constants are not fitted to published results"
    )
    where = "sources are in fastfold/parallel/planner/calibration.json"
    lines.append(f"{rates.calibration}; {checked}; {where}")
    return "\n".join(lines)


def step_text(cost: Cost) -> str:
    """Format the time of a step, and mark it if its rates were not measured."""
    return seconds_text(cost.seconds) + ("" if cost.calibrated else " (uncalibrated)")
