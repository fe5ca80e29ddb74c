"""Run operations and loops of chunks, and free each value after its last use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastfold.memory.chunking.graph import ChunkLayout, Graph, GraphOperation, Path, Ref
from fastfold.memory.chunking.steps import Loop, Step, computed_values, on_meta, used_values


class Program:
    """Executable steps of a graph."""

    def __init__(self, graph: Graph, steps: Sequence[Step]) -> None:
        self.graph, self.steps = graph, tuple(steps)
        last: dict[int, int] = {}
        for number, step in enumerate(steps):
            last |= dict.fromkeys([*used_values(graph, step), *computed_values(step)], number)
        results = graph.output_indices()
        self._leaving: list[list[int]] = [[] for _ in steps]
        for value, number in last.items():
            if value not in results:
                self._leaving[number].append(value)
        self._inner = {
            number: _inner_leaving(graph, s) for number, s in enumerate(steps) if isinstance(s, Loop)
        }

    def run(self, sources: Sequence[Any], *, sample: bool = False) -> list[Any]:
        """Compute the flat results without recording gradients.

        ``sources`` are the first values of the graph. With ``sample`` they are on the device ``meta``. Of each loop,
        only the first two chunks and the last one run, to measure their memory.
        """
        values: dict[int, Any] = dict(enumerate(sources))
        for number, step in enumerate(self.steps):
            if isinstance(step, int):
                operation = self.graph.operation(step)
                arguments = _arguments(operation, lambda _, x: values[x.index] if isinstance(x, Ref) else x)
                values[step] = _call(operation, arguments, sample)
                del arguments
            else:
                self._loop(step, values, self._inner[number], sample)
            for value in self._leaving[number]:
                del values[value]
        return [values[o.index] if isinstance(o, Ref) else o for o in self.graph.outputs]

    def _loop(
        self, loop: Loop, values: dict[int, Any], leaving: Mapping[int, list[int]], sample: bool
    ) -> None:
        whole: dict[int, Tensor] = {}
        starts = range(0, loop.length, loop.size)
        for start in (*starts[:2], *starts[2:][-1:]) if sample else starts:
            length = min(loop.size, loop.length - start)
            parts: dict[int, Any] = {}
            for member in loop.members:
                operation = self.graph.operation(member)
                arguments = self._chunk_arguments(loop, operation, parts, values, start, length)
                parts[member] = _call(operation, arguments, sample)
                del arguments
                if member in loop.outputs and member not in loop.reuse:
                    if member not in whole:
                        whole[member] = _room(self.graph.layout(member), parts[member])
                    whole[member].narrow(loop.dims[member], start, length).copy_(parts[member])
                for value in leaving.get(member, ()):
                    del parts[value]
            for output, value in loop.reuse.items():
                whole[output] = values[value]
                whole[output].narrow(loop.dims[output], start, length).copy_(parts[output])
        values.update(whole)

    def _chunk_arguments(
        self,
        loop: Loop,
        operation: GraphOperation,
        parts: Mapping[int, Any],
        values: Mapping[int, Any],
        start: int,
        length: int,
    ) -> dict[str, Any]:
        """Return the arguments of an operation for one chunk."""
        cut = loop.cuts[operation.index]

        # A recursive function would be a reference cycle, which keeps values until garbage collection.
        def part(path: Path, value: Any) -> Any:
            if path in cut.sizes:
                return length
            if not isinstance(value, Ref):
                return value
            if value.index in parts:
                return parts[value.index]
            whole, dim = values[value.index], cut.dims.get(path)
            if dim is None:
                return whole
            if isinstance(whole, Tensor):
                return whole.narrow(dim, start, length)
            # Select one of several results.
            item = operation.arguments["item"]
            return {item: whole[item].narrow(dim, start, length)}

        return _arguments(operation, part)


def _arguments(operation: GraphOperation, fill: Callable[[Path, Any], Any]) -> dict[str, Any]:
    return {
        name: [fill((name, i), item) for i, item in enumerate(value)]
        if isinstance(value, list | tuple)
        else fill((name,), value)
        for name, value in operation.arguments.items()
    }


def _call(operation: GraphOperation, arguments: dict[str, Any], meta: bool) -> Any:
    return operation.call(on_meta(arguments) if meta else arguments)


def _room(layout: ChunkLayout, part: Tensor) -> Tensor:
    """Allocate a whole output without gaps, with its dimensions in the order that they have without chunks."""
    order = sorted(range(len(layout.shape)), key=lambda dim: -layout.stride[dim])
    return torch.empty_permuted(layout.shape, order, dtype=part.dtype, device=part.device)


def _inner_leaving(graph: Graph, loop: Loop) -> dict[int, list[int]]:
    """Return the values of a chunk that are not used after each operation."""
    last: dict[int, int] = {}
    for member in loop.members:
        last |= {value: member for value in graph.operation(member).inputs if value in loop.inside}
        last[member] = member
    leaving: dict[int, list[int]] = {}
    for value, member in last.items():
        if value not in loop.reuse:
            leaving.setdefault(member, []).append(value)
    return leaving
