"""Plans and their assumptions, as text."""

from __future__ import annotations

from collections.abc import Sequence

from fastfold.parallel.planner.calibration import PUBLISHED, WITHIN
from fastfold.parallel.planner.cost_model import Cost
from fastfold.parallel.planner.hardware import LINKS, Rates
from fastfold.parallel.planner.search import overrides
from fastfold.utils.units import GIB


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
        f"the constants are fitted to published results of other programs on A100 and H100 ({len(PUBLISHED)} values, "
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
