"""Plans and what they rest on, as text."""

from __future__ import annotations

from collections.abc import Sequence

from fastfold.parallel.planner.cost_model import Cost
from fastfold.parallel.planner.hardware import LINKS, Rates
from fastfold.parallel.planner.search import overrides
from fastfold.utils.units import GIB


def plan_table(costs: Sequence[Cost]) -> str:
    """Plans as a table with a line each.

    Args:
        costs: The plans, the best first.

    Returns:
        Number, time per step, memory per GPU, communication share, achieved rate per GPU, and Hydra overrides.
    """
    rows = [("", "time/step", "memory/GPU", "communication", "TFLOP/s/GPU", "settings")]
    for number, cost in enumerate(costs, 1):
        rows.append(
            (
                str(number),
                seconds_text(cost.seconds),
                f"{cost.total_memory / GIB:.1f} GiB",
                f"{cost.communication_share:.1%}",
                f"{cost.flops / cost.seconds / cost.plan.ranks / 1e12:.0f}",
                " ".join(overrides(cost)),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def seconds_text(seconds: float) -> str:
    """A time with its unit, to three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def assumptions_text(rates: Rates, *, training: bool = True) -> str:
    """The rates behind a plan, each with its origin, and what was assumed; of ``training`` also for its memory."""
    lines = [f"rates of {rates.sheet.name}:"]
    numbers = {f"matrix_rates.{dtype}": (rate / 1e12, "TFLOP/s") for dtype, rate in rates.matrix.items()}
    numbers |= {name: (getattr(rates, name) / 1e9, "GB/s") for name in LINKS}
    lines += [
        f"  {name.replace('matrix_rates.', 'matrix products in '):<28} {value:8.0f} {unit:<8} {rates.origin[name]}"
        for name, (value, unit) in numbers.items()
    ]
    assumed = rates.assumptions
    launch, latency = assumed.launch_seconds * 1e6, assumed.latency_seconds * 1e6
    filled = f"; {assumed.memory_share:.0%} of a GPU's memory may be filled" if training else ""
    lines.append(
        f"assumed: a kernel takes at least {launch:g} µs, a message {latency:g} µs in addition to its bytes; "
        f"{assumed.hidden_share:.0%} of the communication inside the model overlaps with computation; "
        f"{rates.sheet.per_machine} GPUs in a machine{filled}"
    )
    return "\n".join(lines)
