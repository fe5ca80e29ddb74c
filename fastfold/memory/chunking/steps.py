"""Steps of a program, operations and loops of chunks, and the memory that is live at each step.

One run on tensors without contents measures the memory.
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
from fastfold.memory.chunking.graph import ChunkLayout, Graph, Ref
from fastfold.memory.devices.simulated import SimulatedDevice

_ENOUGH = 1 << 62


@dataclass(frozen=True)
class Memory:
    """Memory of a graph's values."""

    graph: Graph  #: Graph of the module
    #: By value, the value whose memory it is a view of; None if it has its own memory
    alias: tuple[int | None, ...]
    nbytes: tuple[int, ...]  #: By value, size of that memory
    workspace: tuple[int, ...]  #: By value, bytes that its operation allocates temporarily
    known: dict[Any, int] = field(default_factory=dict, repr=False)  #: Cached memory of loops


def without_contents(layout: ChunkLayout) -> Tensor:
    """Return a tensor with a layout on the device ``meta``."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def on_meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments for tensors on the device ``meta``."""
    return {
        name: torch.device("meta") if isinstance(value, torch.device) else value
        for name, value in arguments.items()
    }


def measure_memory(graph: Graph) -> Memory:
    """Run a graph once without contents, and record the values with their own memory."""
    device = SimulatedDevice(_ENOUGH, "meta")
    values: list[Any] = []
    alias: list[int | None] = []
    nbytes: list[int] = []
    workspace: list[int] = []
    for layout in graph.layouts[: len(graph.sources)]:
        tensor = device.on_host(without_contents(layout)) if isinstance(layout, ChunkLayout) else None
        values.append(tensor)
        alias.append(None)
        nbytes.append(0 if tensor is None else tensor.untyped_storage().nbytes())
        workspace.append(0)
    with device.running(), torch.no_grad():
        for operation in graph.operations:
            before = device.other
            device.mark()
            arguments = tree_map(
                lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf, operation.arguments
            )
            result = operation.call(on_meta(arguments))
            made = device.other - before
            workspace.append(max(0, device.mark() - before - made))
            keys = _storages(result)
            # Record the root value, so that a view of a view refers to it.
            views = [index for _, index in operation.values() if keys & _storages(values[index])]
            alias.append(views[0] if views else None)
            nbytes.append(0 if views else made)
            values.append(result)
    return Memory(graph, tuple(alias), tuple(nbytes), tuple(workspace))


def _storages(value: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class Loop:
    """Operations that run in chunks along one dimension of each of their values."""

    members: tuple[int, ...]  #: Numbers of their values, in order
    dims: Mapping[int, int]  #: Chunked dimension of each value
    cuts: Mapping[int, Cut]  #: Parts of arguments for a chunk of each value
    outputs: tuple[int, ...]  #: Values that other steps use, which are assembled from their chunks
    length: int  #: Length of the dimension
    #: Dimensions along which each earlier value is read; None for as a whole
    read: Mapping[int, frozenset[int | None]]
    chunks: int = 1  #: Number of chunks
    #: Outputs that are written into the memory of a value that is not used again
    reuse: Mapping[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Length of a chunk; the last one may be shorter."""
        return -(-self.length // self.chunks)

    @cached_property
    def inside(self) -> frozenset[int]:
        """Set of the members."""
        return frozenset(self.members)


Step = int | Loop  #: Number of a value whose operation runs unchunked, or a loop


def computed_values(step: Step) -> tuple[int, ...]:
    """Return the values that a step computes."""
    return (step,) if isinstance(step, int) else step.outputs


def used_values(graph: Graph, step: Step) -> Iterable[int]:
    """Return the earlier values that a step uses."""
    return graph.operation(step).inputs if isinstance(step, int) else step.read


def inner_bytes(memory: Memory, loop: Loop) -> int:
    """Return the peak of a loop of one chunk in bytes, without its whole outputs."""
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
        for index in graph.operation(member).inputs:
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
class StepState:
    """Live memory between two steps."""

    live: int  #: Bytes
    root: Mapping[int, int]  #: By value, the value that owns its memory
    #: By owner, bytes that are released with it; none for inputs, which the caller owns
    bytes_of: Mapping[int, int]


@dataclass(frozen=True)
class Profile:
    """Live memory of each step."""

    peaks: tuple[int, ...]  #: Peak in bytes of each step
    steps: tuple[Step, ...]  #: The steps, loops with the memory that they may reuse
    outside: tuple[int, ...]  #: By step, bytes that do not depend on the number of chunks
    states: tuple[StepState, ...]  #: State before each step, if requested

    @property
    def peak(self) -> int:
        """Peak in bytes of all steps."""
        return max(self.peaks, default=0)


def profile(
    memory: Memory,
    steps: Sequence[Step],
    *,
    donate: bool,
    start: StepState | None = None,
    needed: Iterable[int] | None = None,
    states: bool = False,
) -> Profile:
    """Count the live bytes at each step, without parameters and buffers.

    The steps are all in order, or some consecutive ones between a state and values that are ``needed`` afterwards. With
    ``donate`` inputs may be overwritten, and with ``states`` the state before each step is recorded.
    """
    graph, sources = memory.graph, len(memory.graph.sources)
    if start is None:
        inputs = (i for i, source in enumerate(graph.sources) if source.kind == "input")
        start = StepState(sum(memory.nbytes[i] for i in inputs), {i: i for i in range(sources)}, {})
    needed = graph.output_indices() if needed is None else needed
    live, bytes_of = start.live, dict(start.bytes_of)
    root, last = _lifetimes(memory, steps, start, needed)
    end = dict(last)
    moved: dict[int, int] = {}  # from a value's memory to its new owner

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
                StepState(live, {value: final(storage) for value, storage in root.items()}, dict(bytes_of))
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
    memory: Memory, steps: Sequence[Step], start: StepState, needed: Iterable[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the owner of each value's memory, and its last step (beyond the end: later ones)."""
    root = dict(start.root)
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for index in used_values(memory.graph, step):
            last[root[index]] = number
        for index in computed_values(step):
            source = memory.alias[index]
            root[index] = index if source is None or not isinstance(step, int) else root[source]
            last[root[index]] = number
    last |= dict.fromkeys((root[index] for index in needed), len(steps))
    return root, last


def _reusable(
    memory: Memory, loop: Loop, root: Mapping[int, int], ends: Mapping[int, bool], donate: bool
) -> dict[int, int]:
    """Return the outputs of a loop that may overwrite a value of the same layout.

    ``ends`` is True for values whose memory is not used after this loop. Each chunk of such a value is read only by the
    chunk that overwrites it, and no other output is a view of it.
    """
    graph, reusable, used = memory.graph, {}, set()
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
            # All reads of this memory are along that dimension.
            alone = all(other == value or root[other] != storage for other in read)
            others = all(origins[other] != storage for other in loop.outputs if other != output)
            if owned and whole and alone and others and ends[value]:
                reusable[output] = value
                used.add(storage)
                break
    return reusable
