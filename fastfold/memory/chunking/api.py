"""From a module and a budget to a module that stays within it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastfold.memory.chunking.chunked_module import ChunkedModule
from fastfold.memory.chunking.graph import Graph, Layout, export_graph
from fastfold.memory.chunking.plan import ChunkPlan, regions_of
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
    """A module that gives what ``module`` gives, in chunks, so that its peak stays under a budget.

    The module is exported by ``torch.export``. Where its graph holds more than the budget, a region around that is run
    in chunks along a dimension along which its results do not depend on each other, and what is between lives a chunk
    at a time. Results are equal within rounding: products of other sizes may add up in another order. Peaks are those
    that a simulated device measures, of inputs, results and what PyTorch's operators make in between; what a kernel
    takes inside itself is not seen, and parameters come on top.

    Args:
        module: Any module, in the mode in which it will run (most often ``eval()``), seen as it runs where gradients
            are recorded. Its operators are cut where it is known how they carry dimensions, see
            :mod:`fastfold.memory.chunking.flow`.
        example: What it will be called with: a tensor of any shape, a tuple of arguments by position, or a mapping of
            arguments by name. The result is for these shapes, dtypes and devices; contents do not count.
        budget: Bytes, such as ``"2GiB"``.
        donate: The inputs may be overwritten by the call: results take their memory where that is possible.
        decompositions: Operators to be taken apart by functions of the same arguments, as
            ``ExportedProgram.run_decompositions`` takes them; for own operators, which are not cut otherwise.

    Returns:
        The module, with what was decided as ``plan``, to be printed.

    Raises:
        BudgetError: No chunks were found that stay under the budget; names the smallest one that works.
        ConfigError: The module cannot be exported: it depends on the contents of tensors, changes its inputs or
            buffers in place, or draws random numbers; or the budget is not an amount of memory.
    """
    allowed = parse_bytes(budget)
    args, kwargs = _arguments(example)
    with torch.inference_mode(False), torch.enable_grad():
        graph = export_graph(module, args, kwargs, decompositions or {})
    search = Search(measure_memory(graph), donate=donate)
    before = search.unchunked()
    peak_before = measured_peak(graph, before.profile.steps)
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
    """The first choice that the simulated device finds under the budget, and its peak."""

    def attempts(choose: Callable[[int], Chosen]) -> tuple[Chosen, int] | None:
        target = budget
        for _ in range(_ATTEMPTS):
            chosen = choose(target)
            peak = measured_peak(graph, chosen.profile.steps)
            if peak <= budget:
                return chosen, peak
            if not chosen.fits:
                return None
            target -= peak - budget  # what was not counted
        return None

    found = attempts(search.choose)
    if found is not None:
        return found
    least = search.choose(0)
    found = attempts(lambda target: search.fewest_chunks(least.profile.steps, target))
    if found is not None:
        return found
    smallest = measured_peak(graph, least.profile.steps)
    if smallest <= budget:
        return least, smallest
    raise BudgetError(
        f"a budget of {budget:,} bytes is too small: inputs, results and what cannot be cut take {smallest:,} bytes at "
        "once, which is the smallest budget that works. Inputs that may be overwritten (donate=True), a smaller batch "
        "or lower precision need less",
        smallest,
    )


def measured_peak(graph: Graph, steps: tuple[Step, ...]) -> int:
    """Most bytes that a simulated device sees while steps run, without parameters and buffers.

    Args:
        graph: The graph.
        steps: All of its steps.
    """
    device = SimulatedDevice(_ENOUGH, "meta")
    sources: list[Any] = []
    for number, source in enumerate(graph.sources):
        layout = graph.layouts[number]
        value = without_contents(layout) if isinstance(layout, Layout) else _constant(graph, source.position)
        if isinstance(value, Tensor):
            if source.kind == "input":
                device.hold(value)
            else:
                device.on_host(value)
        sources.append(value)
    with device.running(), torch.no_grad():
        Program(graph, steps).run(sources, sample=True)
    return device.mark()


def _constant(graph: Graph, position: int) -> Any:
    return graph.inputs[position] if position >= 0 else None
