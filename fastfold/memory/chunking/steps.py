"""What runs after what: operations as they are, and loops that run several of them chunk by chunk.

A profile says what lives at each step, from one run of the graph on tensors without contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fastfold.memory.chunking.flow import Cut
from fastfold.memory.chunking.graph import Graph, Layout, Ref
from fastfold.memory.devices.simulated import SimulatedDevice

_ENOUGH = 1 << 62


@dataclass(frozen=True)
class Memory:
    """What the values of a graph take.

    Attributes:
        graph: The graph.
        alias: By value, the one whose memory it is a view of; None if it has memory of its own.
        nbytes: By value, bytes of that memory.
        workspace: By value, bytes that its operation takes besides, while it runs.
        known: What has been counted of loops.
    """

    graph: Graph
    alias: tuple[int | None, ...]
    nbytes: tuple[int, ...]
    workspace: tuple[int, ...]
    known: dict[Any, int] = field(default_factory=dict, repr=False)


def without_contents(layout: Layout) -> Tensor:
    """A tensor of a layout on the device ``meta``."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def on_meta(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an operator for tensors on the device ``meta``."""
    return {
        name: torch.device("meta") if isinstance(value, torch.device) else value
        for name, value in given.items()
    }


def measure_memory(graph: Graph) -> Memory:
    """Run a graph once without contents, and note what has memory of its own."""
    device = SimulatedDevice(_ENOUGH, "meta")
    values: list[Any] = []
    alias: list[int | None] = []
    nbytes: list[int] = []
    workspace: list[int] = []
    for layout in graph.layouts[: len(graph.sources)]:
        tensor = device.on_host(without_contents(layout)) if isinstance(layout, Layout) else None
        values.append(tensor)
        alias.append(None)
        nbytes.append(0 if tensor is None else tensor.untyped_storage().nbytes())
        workspace.append(0)
    with device.running(), torch.no_grad():
        for operation in graph.operations:
            before = device.other
            device.mark()
            given = tree_map(
                lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf, operation.given
            )
            result = operation.call(on_meta(given))
            made = device.other - before
            workspace.append(max(0, device.mark() - before - made))
            keys = _storages(result)
            # Of what it was given, so that a view of a view is one of that.
            views = [index for _, index in operation.values() if keys & _storages(values[index])]
            alias.append(views[0] if views else None)
            nbytes.append(0 if views else made)
            values.append(result)
    return Memory(graph, tuple(alias), tuple(nbytes), tuple(workspace))


def _storages(value: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class Loop:
    """Operations that run chunk by chunk along one dimension of each of their values.

    Attributes:
        members: Their values, in order.
        dims: The dimension of each of them.
        cuts: What a chunk of each is made of.
        outputs: Those of them that others need, which are put together.
        length: Of the dimension.
        read: Along which dimensions each value from before is read; None for as a whole.
        chunks: How many chunks there are.
        reuse: Outputs that are written into the memory of a value that nobody needs afterwards.
    """

    members: tuple[int, ...]
    dims: Mapping[int, int]
    cuts: Mapping[int, Cut]
    outputs: tuple[int, ...]
    length: int
    read: Mapping[int, frozenset[int | None]]
    chunks: int = 1
    reuse: Mapping[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Length of a chunk; the last one may be shorter."""
        return -(-self.length // self.chunks)

    @cached_property
    def inside(self) -> frozenset[int]:
        """The members."""
        return frozenset(self.members)


Step = int | Loop
"""A value whose operation runs as it is, or a loop."""


def made(step: Step) -> tuple[int, ...]:
    """Values that are there after a step."""
    return (step,) if isinstance(step, int) else step.outputs


def taken(graph: Graph, step: Step) -> Iterable[int]:
    """Values that a step needs from before."""
    return graph.operation(step).taken if isinstance(step, int) else step.read


def inner_bytes(memory: Memory, loop: Loop) -> int:
    """Most bytes inside a loop of one chunk, without its whole outputs."""
    key = (loop.members, tuple(loop.reuse))
    if key not in memory.known:
        memory.known[key] = _inner_bytes(memory, loop)
    return memory.known[key]


def _inner_bytes(memory: Memory, loop: Loop) -> int:
    graph, last = memory.graph, {}
    roots: dict[int, int] = {}
    for member in loop.members:
        source = memory.alias[member]
        roots[member] = member if source is None else roots.get(source, -1)
        last[roots[member]] = member
        for index in graph.operation(member).taken:
            if index in roots:
                last[roots[index]] = member
    leaving: dict[int, list[int]] = {}
    for root, member in last.items():
        leaving.setdefault(member, []).append(root)
    for output in loop.reuse:
        if roots[output] >= 0:
            leaving[last[roots[output]]].remove(roots[output])
            last[roots[output]] = loop.members[-1]
            leaving.setdefault(loop.members[-1], []).append(roots[output])
    live = peak = 0
    for member in loop.members:
        if memory.alias[member] is None:
            live += memory.nbytes[member]
        peak = max(peak, live + memory.workspace[member])
        live -= sum(memory.nbytes[root] for root in leaving.get(member, ()) if root >= 0)
    return peak


@dataclass(frozen=True)
class State:
    """What lives between two steps.

    Attributes:
        live: Bytes.
        root: By value, the one whose memory it is in.
        bytes_of: By such a value, the bytes that go with it; not those of inputs, which their owner keeps.
    """

    live: int
    root: Mapping[int, int]
    bytes_of: Mapping[int, int]

    @staticmethod
    def first(memory: Memory) -> State:
        """Before the first step: the inputs. Parameters and buffers are not counted."""
        sources = memory.graph.sources
        live = sum(memory.nbytes[i] for i, source in enumerate(sources) if source.kind == "input")
        return State(live, {index: index for index in range(len(sources))}, {})


@dataclass(frozen=True)
class Profile:
    """What lives while steps run.

    Attributes:
        peaks: Most bytes during each step.
        steps: The steps, loops with the memory that they may reuse.
        outside: Of each step, bytes that do not depend on the number of chunks.
        states: Before each step, if they were asked for.
    """

    peaks: tuple[int, ...]
    steps: tuple[Step, ...]
    outside: tuple[int, ...]
    states: tuple[State, ...]

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        return max(self.peaks, default=0)


def profile(
    memory: Memory,
    steps: Sequence[Step],
    *,
    donate: bool,
    start: State | None = None,
    needed: Iterable[int] | None = None,
    states: bool = False,
) -> Profile:
    """Count what lives at each step: inputs, results, and what is between them, without parameters and buffers.

    Args:
        memory: Of the graph.
        steps: All of them in order, or some that follow each other.
        donate: Whether inputs may be overwritten.
        start: What lives before the first of them; None for the inputs.
        needed: Values that are needed after the last of them; None for the results.
        states: Whether to note what lives before each step.
    """
    graph, sources = memory.graph, len(memory.graph.sources)
    start = State.first(memory) if start is None else start
    needed = graph.output_indices() if needed is None else needed
    live, bytes_of = start.live, dict(start.bytes_of)
    root, last = _lifetimes(memory, steps, start, needed)
    end = dict(last)
    moved: dict[int, int] = {}  # the memory of one value that is now another's

    def final(storage: int) -> int:
        while storage in moved:
            storage = moved[storage]
        return storage

    leaving: list[list[int]] = [[] for _ in range(len(steps) + 1)]
    for storage, number in last.items():
        if storage >= sources:
            leaving[number].append(storage)
    live -= sum(bytes_of.pop(storage) for storage in start.bytes_of if storage not in last)
    peaks, outside, done, seen = [], [], [], []
    for number, step in enumerate(steps):
        if states:
            seen.append(
                State(live, {value: final(storage) for value, storage in root.items()}, dict(bytes_of))
            )
        inner = 0
        if isinstance(step, int):
            if root[step] == step:
                bytes_of[step] = memory.nbytes[step]
                live += bytes_of[step]
            here = live + memory.workspace[step]
        else:
            reuse = _reusable(
                memory, step, root, {v: end.get(final(root[v])) == number for v in step.read}, donate
            )
            for output in step.outputs:
                if output in reuse:
                    target = moved[output] = final(root[reuse[output]])
                    end[target] = last[output]
                    if target >= sources:
                        leaving[number].remove(target)
                        leaving[last[output]].append(target)
                else:
                    bytes_of[output] = graph.layout(output).nbytes
                    live += bytes_of[output]
            step = replace(step, reuse=reuse)
            inner = -(-inner_bytes(memory, step) * step.size // step.length)
            here = live
        done.append(step)
        outside.append(here)
        peaks.append(here + inner)
        live -= sum(bytes_of.pop(storage, 0) for storage in leaving[number])
    return Profile(tuple(peaks), tuple(done), tuple(outside), tuple(seen))


def _lifetimes(
    memory: Memory, steps: Sequence[Step], start: State, needed: Iterable[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The value that owns each value's memory, and the last step that needs it (beyond the end: later ones)."""
    root = dict(start.root)
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for index in taken(memory.graph, step):
            last[root[index]] = number
        for index in made(step):
            source = memory.alias[index]
            root[index] = index if source is None or not isinstance(step, int) else root[source]
            last[root[index]] = number
    last |= dict.fromkeys((root[index] for index in needed), len(steps))
    return root, last


def _reusable(
    memory: Memory,
    loop: Loop,
    root: Mapping[int, int],
    ends: Mapping[int, bool],
    donate: bool,
) -> dict[int, int]:
    """Outputs of a loop that may be written over a value of the same layout.

    ``ends`` says of which values the memory is not needed after this loop. Each chunk of that value is read by the
    chunk of the loop that overwrites it alone, nobody reads it later, and no other output is a view of it.
    """
    graph, found, used = memory.graph, {}, set()
    read = loop.read
    views = {member: memory.alias[member] for member in loop.members}

    def origin(value: int) -> int:
        while views.get(value) is not None:
            value = views[value]  # type: ignore[assignment]
        return value

    origins = {output: root.get(origin(output), origin(output)) for output in loop.outputs}
    for output in loop.outputs:
        layout = graph.layout(output)
        for value, dims in read.items():
            if dims != {loop.dims[output]} or graph.layouts[value] != layout or root[value] in used:
                continue
            storage = root[value]
            source = graph.sources[storage] if storage < len(graph.sources) else None
            owned = source is None or (source.kind == "input" and donate)
            whole = layout.nbytes == (
                memory.nbytes[storage] if memory.alias[storage] is None else graph.layout(storage).nbytes
            )
            # All that is read of this memory is read along that dimension.
            alone = all(other == value or root[other] != storage for other in read)
            others = all(origins[other] != storage for other in loop.outputs if other != output)
            if owned and whole and alone and others and ends[value]:
                found[output] = value
                used.add(storage)
                break
    return found
