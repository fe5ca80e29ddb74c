"""Public function of automatic chunking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.memory.chunking.chunked_module import ChunkedModule, ChunkPlan, regions_of
from fastfold.memory.chunking.graph import Graph, Layout, export_graph
from fastfold.memory.chunking.program import Program
from fastfold.memory.chunking.search import Chosen, Search
from fastfold.memory.chunking.steps import Step, measure_memory, without_contents
from fastfold.memory.devices.simulated import SimulatedDevice
from fastfold.memory.planner.schedule import BudgetError
from fastfold.utils.units import parse_bytes

_ENOUGH = 1 << 62
_ATTEMPTS = 6


def autochunk(
    module: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    budget: str | int,
    *,
    donate: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> ChunkedModule:
    """Convert a module to one that computes in chunks and stays under a memory budget.

    ``torch.export`` exports the module. Where its graph needs more than the budget, the operations around the peak run
    in chunks along a dimension on which their results are independent, and intermediate tensors exist for one chunk at
    a time. Results are equal within rounding, because products of other sizes may sum in another order. A simulated
    device measures the peaks: inputs, results, and tensors made by PyTorch's operators. Workspaces inside a kernel are
    not counted, and parameters come on top.

    Args:
        module: Any module, in the mode in which it will run, usually ``eval()``. Operators are chunked if
            :mod:`fastfold.memory.chunking.flow` has a rule for them. The export records gradients.
        example: Example input: a tensor of any shape, a tuple of positional arguments, or a mapping of arguments by
            name. The result works for these shapes, dtypes and devices, and for any values.
        budget: Bytes, for example ``"2GiB"``.
        donate: Let the call overwrite its inputs, so that results can use their memory.
        decompositions: Operators to decompose, with functions of the same arguments, as for
            ``ExportedProgram.run_decompositions``. Custom operators are chunked only if they are decomposed.

    Raises:
        BudgetError: No chunks stay under the budget. Names the smallest budget that works.
        ConfigError: The module cannot be exported, because it depends on the values of tensors, changes inputs or
            buffers in place, or draws random numbers. Or the budget is not an amount of memory.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.memory import autochunk
        >>> module, x = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)), torch.randn(512, 8)
        >>> chunked = autochunk(module, x, "256KiB")
        >>> chunked.plan.peak <= 256 * 1024 < chunked.plan.peak_before
        True
        >>> with torch.no_grad():
        ...     torch.allclose(chunked(x), module(x), atol=1e-5)
        True
    """
    allowed = parse_bytes(budget)
    args, kwargs = _arguments(example)
    with torch.inference_mode(False), torch.enable_grad():
        graph = export_graph(module, args, kwargs, decompositions or {})
    search = Search(measure_memory(graph), donate=donate)
    before = search.unchunked()
    peak_before = _measured_peak(graph, before.profile.steps)
    chosen, peak = (before, peak_before) if peak_before <= allowed else _within(graph, search, allowed)
    steps = chosen.profile.steps
    plan = ChunkPlan(
        budget=allowed,
        regions=regions_of(graph, steps),
        peak_before=peak_before,
        peak=peak,
        estimated=chosen.profile.peak,
        parameters=sum(
            graph.layout(number).nbytes
            for number, source in enumerate(graph.sources)
            if source.kind != "input"
        ),
    )
    return ChunkedModule(module, Program(graph, steps), plan, donate=donate)


def _arguments(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), example
    return tuple(example), {}


def _within(graph: Graph, search: Search, budget: int) -> tuple[Chosen, int]:
    """Return the first choice under the budget on the simulated device, and its peak."""

    def attempts(choose: Callable[[int], Chosen]) -> tuple[Chosen, int] | None:
        target = budget
        for _ in range(_ATTEMPTS):
            chosen = choose(target)
            peak = _measured_peak(graph, chosen.profile.steps)
            if peak <= budget:
                return chosen, peak
            if not chosen.fits:
                return None
            target -= peak - budget  # bytes that the estimate missed
        return None

    found = attempts(search.choose)
    if found is not None:
        return found
    least = search.choose(0)
    found = attempts(lambda target: search.fewest_chunks(least.profile.steps, target))
    if found is not None:
        return found
    smallest = _measured_peak(graph, least.profile.steps)
    if smallest <= budget:
        return least, smallest
    raise BudgetError(
        f"a budget of {budget:,} bytes is too small: inputs, results and operations that cannot be chunked take "
        f"{smallest:,} bytes at once, which is the smallest budget that works. Inputs that may be overwritten "
        "(donate=True), a smaller batch or lower precision need less",
        smallest,
    )


def _measured_peak(graph: Graph, steps: tuple[Step, ...]) -> int:
    """Measure the peak of activation memory in bytes, without parameters, on a simulated device."""
    device = SimulatedDevice(_ENOUGH, "meta")
    sources: list[Any] = []
    for number, source in enumerate(graph.sources):
        layout = graph.layouts[number]
        constant = graph.inputs[source.position] if source.position >= 0 else None
        value = without_contents(layout) if isinstance(layout, Layout) else constant
        if isinstance(value, Tensor):
            if source.kind == "input":
                device.hold(value)
            else:
                device.on_host(value)
        sources.append(value)
    with device.running(), torch.no_grad():
        Program(graph, steps).run(sources, sample=True)
    return device.mark()
