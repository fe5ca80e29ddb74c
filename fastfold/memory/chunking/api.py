"""Public function of automatic chunking."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.memory.chunking.chunked_module import ChunkedModule, ChunkPlan, regions_of
from fastfold.memory.chunking.graph import ChunkLayout, Graph, export_graph
from fastfold.memory.chunking.program import Program
from fastfold.memory.chunking.search import Chosen, Search
from fastfold.memory.chunking.steps import Step, measure_memory, without_contents
from fastfold.memory.devices.simulated import SimulatedDevice
from fastfold.memory.planner.schedule import BudgetError
from fastfold.utils.units import parse_bytes

_ENOUGH = 1 << 62
_ATTEMPTS = 6
_HALVINGS = 9


class SearchLimit(BudgetError):
    """Search for chunks that ended by its limit of time.

    ``best`` is the best module so far, which exceeds the budget; ``smallest`` is the peak of its plan in bytes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.memory import SearchLimit, autochunk
        >>> module = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8))
        >>> try:
        ...     autochunk(module, torch.randn(512, 8), "256KiB", seconds=0)
        ... except SearchLimit as error:
        ...     error.best.plan.peak == error.smallest
        True
    """

    def __init__(self, budget: int, seconds: float, best: ChunkedModule) -> None:
        peak = best.plan.peak
        super().__init__(
            f"no chunks under a budget of {budget:,} bytes in {seconds:,.0f} s of processor time; the best so far take "
            f"{peak:,} bytes. Set seconds= to search longer, set a larger budget, or use the module in "
            "this error's attribute best",
            peak,
        )
        self.best = best


def autochunk(
    module: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    budget: str | int,
    *,
    donate: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    seconds: float = 120.0,
    report: Callable[[str], None] | None = None,
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
        seconds: Processor time of the search. Results do not depend on it.
        report: Called with a line after each region of the search, for example ``print``.

    Raises:
        SearchLimit: The time ended before the search did. The error has the best module so far.
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
    began = time.thread_time()

    def report_peak(peak: int) -> None:
        if report is not None:
            spent = time.thread_time() - began
            report(f"autochunk: peak {peak:,} bytes of a budget of {allowed:,} after {spent:.0f} s")

    search = Search(measure_memory(graph), donate=donate, seconds=seconds, report=report_peak)
    before = search.unchunked()
    peak_before = _measured_peak(graph, before.profile.steps)

    def chunked(chosen: Chosen, peak: int) -> ChunkedModule:
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

    if peak_before <= allowed:
        return chunked(before, peak_before)
    chosen, peak = _within(graph, search, allowed)
    if peak <= allowed:
        return chunked(chosen, peak)
    if search.is_over:
        raise SearchLimit(allowed, seconds, chunked(chosen, peak))
    raise BudgetError(
        f"a budget of {allowed:,} bytes is too small: inputs, results and operations that cannot be chunked take "
        f"{peak:,} bytes at once, which is the smallest budget that works. Inputs that may be overwritten "
        "(donate=True), a smaller batch or lower precision need less",
        peak,
    )


def _arguments(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), example
    return tuple(example), {}


def _within(graph: Graph, search: Search, budget: int) -> tuple[Chosen, int]:
    """Return the first choice under the budget on the simulated device, and its peak.

    If there is none, it is the choice of the smallest peak; after the end of the time, the best one so far.
    """
    tried: list[tuple[Chosen, int]] = []
    target, steps = budget, None
    for _ in range(_ATTEMPTS):
        chosen = search.choose(target, steps)
        peak = _measured_peak(graph, chosen.profile.steps)
        tried.append((chosen, peak))
        if peak <= budget:
            return chosen, peak
        if not chosen.fits:
            break
        steps = chosen.profile.steps
        target -= peak - budget  # bytes that the estimate missed
    if not search.is_over:
        smallest = search.choose(0)
        smallest_peak = _measured_peak(graph, smallest.profile.steps)
        if smallest_peak <= budget:
            return _fewest_chunks(graph, search, smallest, smallest_peak, budget)
        # Only this choice does not depend on the budget, so a search under its peak finds it again.
        tried = [(smallest, smallest_peak), *(tried if search.is_over else [])]
    return min(tried, key=lambda choice: choice[1])


def _fewest_chunks(
    graph: Graph, search: Search, smallest: Chosen, smallest_peak: int, budget: int
) -> tuple[Chosen, int]:
    """Return the regions of the smallest peak in as few chunks as the budget allows, and their peak in bytes.

    Estimates of the peak differ from measurements, so bisection finds the largest target that keeps the budget.
    """
    best, low, high = (smallest, smallest_peak), 0, 2 * budget
    for _ in range(_HALVINGS):
        if search.is_over:
            break
        target = (low + high) // 2
        chosen = search.fewest_chunks(smallest.profile.steps, target)
        peak = _measured_peak(graph, chosen.profile.steps)
        if peak <= budget:
            best, low = (chosen, peak), target
        else:
            high = target
    return best


def _measured_peak(graph: Graph, steps: tuple[Step, ...]) -> int:
    """Measure the peak of activation memory in bytes, without parameters, on a simulated device."""
    device = SimulatedDevice(_ENOUGH, "meta")
    sources: list[Any] = []
    for number, source in enumerate(graph.sources):
        layout = graph.layouts[number]
        constant = graph.inputs[source.position] if source.position >= 0 else None
        value = without_contents(layout) if isinstance(layout, ChunkLayout) else constant
        if isinstance(value, Tensor):
            if source.kind == "input":
                device.hold(value)
            else:
                device.on_host(value)
        sources.append(value)
    with device.running(), torch.no_grad():
        Program(graph, steps).run(sources, sample=True)
    return device.mark()
