"""Regions of a graph that can run in chunks, found by following a dimension of one value back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastfold.memory.chunking.flow import Cut, find_cut
from fastfold.memory.chunking.graph import Graph, Layout
from fastfold.memory.chunking.steps import Loop, Step, computed_values, used_values


@dataclass(frozen=True)
class Flow:
    """Values that can be computed in chunks, up to one end value.

    ``length`` is that of the chunked dimension of ``end``. ``dims`` has that dimension of each value, and ``cuts`` the
    parts of arguments for a chunk of each value.
    """

    end: int
    length: int
    dims: dict[int, int]
    cuts: dict[int, Cut]


class Cuts:
    """Cached rules of a graph's operations."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[tuple[int, int], Cut | None] = {}

    def find(self, value: int, dim: int) -> Cut | None:
        """Return :func:`~fastfold.memory.chunking.flow.find_cut` for the operation of a value."""
        key = (value, dim)
        if key not in self._known:
            self._known[key] = find_cut(self._graph, self._graph.operation(value), dim)
        return self._known[key]


def dissolved(steps: Sequence[Step]) -> list[int]:
    """Return the operations of some steps, each once, including those inside loops."""
    return list(
        dict.fromkeys(
            value for step in steps for value in ((step,) if isinstance(step, int) else step.members)
        )
    )


def flow_back(graph: Graph, cuts: Cuts, span: Sequence[Step], end: int, dim: int) -> Flow | None:
    """Follow a dimension of a value back as far as possible.

    A value needed along two dimensions, or as a whole, is computed before the loop, and so are its inputs. Steps of
    ``span`` may take part, but loops do not; ``end`` is the chunked value of one of them.
    """
    layout = graph.layouts[end]
    if not isinstance(layout, Layout):
        return None
    wanted: dict[int, set[int | None]] = {end: {dim}}
    found = Flow(end, layout.shape[dim], {}, {})
    for step in reversed(span):
        if not isinstance(step, int) or step not in wanted:
            continue
        dims = wanted[step]
        own = next(iter(dims))
        if len(dims) > 1 or own is None:
            continue
        cut = cuts.find(step, own)
        if cut is None:
            continue
        found.dims[step], found.cuts[step] = own, cut
        for path, index in graph.operation(step).values():
            wanted.setdefault(index, set()).add(cut.dims.get(path))
    return found if end in found.dims else None


def make_loop(graph: Graph, span: Sequence[Step], flow: Flow, needed: Iterable[int]) -> list[Step]:
    """Convert the part of consecutive steps that belongs to a flow to a loop.

    The steps of ``span`` are consecutive; later steps or the caller use the values ``needed``.

    Returns:
        Steps that the loop uses, the loop, and the remaining steps. A value that is also needed as a whole is computed
        twice. The steps are unchanged if a loop is not possible.
    """
    members = _used(graph, [step for step in span if isinstance(step, int) and step in flow.dims], flow.end)
    cuts = {member: flow.cuts[member] for member in members}
    read: dict[int, set[int | None]] = {}
    for member in members:
        for path, index in graph.operation(member).values():
            if index not in cuts:
                read.setdefault(index, set()).add(cuts[member].dims.get(path))
    before = _demanded(graph, span, read)
    present = {value for step in before for value in computed_values(step)}
    skipped = cuts.keys() | present
    after = _demanded(graph, [step for step in span if skipped.isdisjoint(computed_values(step))], needed)
    wanted = set(needed).union(*(used_values(graph, step) for step in after))
    outputs = tuple(m for m in members if m == flow.end or (m in wanted and m not in present))
    if not all(isinstance(graph.layouts[output], Layout) for output in outputs):
        return list(span)  # several results cannot be assembled at once
    loop = Loop(
        members=tuple(members),
        dims={member: flow.dims[member] for member in members},
        cuts=cuts,
        outputs=outputs,
        length=flow.length,
        read={value: frozenset(dims) for value, dims in read.items()},
    )
    return [*before, loop, *after]


def _demanded(graph: Graph, span: Sequence[Step], values: Iterable[int]) -> list[Step]:
    """Return the steps from which some values are computed."""
    wanted = set(values)
    found: list[Step] = []
    for step in reversed(span):
        if not wanted.isdisjoint(computed_values(step)):
            found.append(step)
            wanted.update(used_values(graph, step))
    return found[::-1]


def _used(graph: Graph, inside: list[int], end: int) -> list[int]:
    """Return the operations from which the end value is computed."""
    wanted = {end}
    found: list[int] = []
    for value in reversed(inside):
        if value in wanted:
            found.insert(0, value)
            wanted.update(graph.operation(value).inputs)
    return found
