"""What runs in chunks, and what that does to the memory: to be read and printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastfold.memory.chunking.graph import Graph
from fastfold.memory.chunking.steps import Loop, Step


@dataclass(frozen=True)
class Region:
    """A part of a module that runs in chunks.

    Attributes:
        first: Operator of its first operation.
        last: Of its last one.
        operations: How many there are.
        shape: Of its last result.
        dim: Dimension along which that is cut.
        chunks: How many chunks there are.
        size: Length of a chunk along the dimension; the last one may be shorter.
        in_place: Whether results are written over what is not needed any more.
    """

    first: str
    last: str
    operations: int
    shape: tuple[int, ...]
    dim: int
    chunks: int
    size: int
    in_place: bool

    def __str__(self) -> str:
        place = ", in place" if self.in_place else ""
        return (
            f"{self.operations} operations, {self.first} to {self.last} {list(self.shape)}: dimension {self.dim} in "
            f"{self.chunks} chunks of {self.size}{place}"
        )


@dataclass(frozen=True)
class ChunkPlan:
    """How a module is run so that its peak stays under a budget.

    Bytes are those of inputs, results and all between them; parameters and buffers come on top.

    Attributes:
        budget: Bytes that there are.
        regions: What runs in chunks.
        peak_before: Most bytes at a time without chunks, as the simulated device measured it.
        peak: The same with them.
        estimated: What the search had counted for ``peak``.
        parameters: Bytes of parameters, buffers and constants.
    """

    budget: int
    regions: tuple[Region, ...]
    peak_before: int
    peak: int
    estimated: int
    parameters: int

    def __str__(self) -> str:
        lines = [
            f"peak {self.peak:,} bytes of a budget of {self.budget:,}, {self.peak_before:,} without chunks (measured "
            f"on the simulated device; estimated {self.estimated:,}); parameters take {self.parameters:,} more",
            *(f"- {region}" for region in self.regions),
        ]
        return "\n".join(lines)


def regions_of(graph: Graph, steps: Sequence[Step]) -> tuple[Region, ...]:
    """Each loop of some steps."""
    return tuple(
        Region(
            first=graph.operation(step.members[0]).name,
            last=graph.operation(step.members[-1]).name,
            operations=len(step.members),
            shape=graph.layout(step.members[-1]).shape,
            dim=step.dims[step.members[-1]],
            chunks=-(-step.length // step.size),
            size=step.size,
            in_place=bool(step.reuse),
        )
        for step in steps
        if isinstance(step, Loop)
    )
