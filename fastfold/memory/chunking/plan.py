"""Printable summary of chunked regions and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastfold.memory.chunking.graph import Graph
from fastfold.memory.chunking.steps import Loop, Step


@dataclass(frozen=True)
class Region:
    """Part of a module that runs in chunks."""

    first: str  #: Operator of its first operation
    last: str  #: Operator of its last operation
    operations: int  #: Number of operations
    shape: tuple[int, ...]  #: Shape of its last result
    dim: int  #: Chunked dimension of that result
    chunks: int  #: Number of chunks
    size: int  #: Length of a chunk along the dimension; the last one may be shorter
    in_place: bool  #: True if results overwrite values that are not used again

    def __str__(self) -> str:
        place = ", in place" if self.in_place else ""
        return (
            f"{self.operations} operations, {self.first} to {self.last} {list(self.shape)}: dimension {self.dim} in "
            f"{self.chunks} chunks of {self.size}{place}"
        )


@dataclass(frozen=True)
class ChunkPlan:
    """Chunked regions of a module, and its peak memory.

    Bytes count inputs, results and intermediate values; parameters and buffers come on top.
    """

    budget: int  #: Budget in bytes
    regions: tuple[Region, ...]  #: Regions that run in chunks
    peak_before: int  #: Peak in bytes without chunks, measured on the simulated device
    peak: int  #: Peak in bytes with chunks, measured on the simulated device
    estimated: int  #: Estimate of ``peak`` by the search
    parameters: int  #: Bytes of parameters, buffers and constants

    def __str__(self) -> str:
        lines = [
            f"peak {self.peak:,} bytes of a budget of {self.budget:,}, {self.peak_before:,} without chunks (measured "
            f"on the simulated device; estimated {self.estimated:,}); parameters take {self.parameters:,} more",
            *(f"- {region}" for region in self.regions),
        ]
        return "\n".join(lines)


def regions_of(graph: Graph, steps: Sequence[Step]) -> tuple[Region, ...]:
    """Return a summary of each loop."""
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
