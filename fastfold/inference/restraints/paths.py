"""Shortest paths over a chain and restraints: the largest distances that residues can have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STEP, TWO_STEPS = 4.0, 7.6
"""Largest distances in Å of CA one and two residues apart: 3.8 and 7.3 in ideal geometry."""

_SOURCES = 2048  #: Residues from which paths are looked for at a time
_ROUNDING = 1e-5  #: Relative error of lengths that are summed in float32


class Edge(NamedTuple):
    """Largest distance of the CA atoms of two residues by a restraint."""

    first: int  #: Place of a residue in the target
    second: int  #: Place of the other one
    length: float  #: In Å
    restraint: int  #: Number of the restraint


class ShortestPath(NamedTuple):
    """Path between two residues."""

    length: float  #: In Å
    restraints: tuple[int, ...]  #: Numbers of the restraints on it, from its start


def chain_span(separation: int) -> float:
    """Return the largest distance in Å of CA atoms that are ``separation`` residues apart in a chain."""
    pairs, single = divmod(separation, 2)
    return pairs * TWO_STEPS + single * STEP


def shorter_paths(
    places: Sequence[int],
    separations: Sequence[int | None],
    edges: Sequence[Edge],
    limits: Sequence[tuple[int, int, float]],
) -> list[ShortestPath | None]:
    """Return the shortest path between each pair of residues; None if it reaches the limit.

    Distances from many residues are lowered together, along the chains and over the restraints in turn, until none
    changes (the algorithm of Bellman and Ford).

    Args:
        places: Residues of edges and limits by their places in the target, in order.
        separations: Number of peptide bonds from each of them to the next; None where a chain ends.
        edges: Restraints.
        limits: First and second residue, and a length in Å.
    """
    longest = max((limit for *_, limit in limits), default=0.0)
    is_end = [one is None or chain_span(one) > longest for one in separations]
    steps = [1 if end or one is None else one for one, end in zip(separations, is_end, strict=True)]
    numbers = np.cumsum([0, *steps]).tolist()
    nodes = dict(zip(places, numbers, strict=True))
    starts = [0, *(node for node, end in zip(numbers[1:], is_end, strict=True) if end)]
    graph = _BondGraph(
        numbers[-1] + 1,
        starts,
        [edge._replace(first=nodes[edge.first], second=nodes[edge.second]) for edge in edges],
    )
    paths: list[ShortestPath | None] = [None] * len(limits)
    by_source: dict[int, list[int]] = defaultdict(list)
    for number, (first, _, _) in enumerate(limits):
        by_source[nodes[first]].append(number)
    sources = sorted(by_source)
    for start in range(0, len(sources), _SOURCES):
        block = sources[start : start + _SOURCES]
        lengths = graph.lengths_from(block, longest)
        for column, source in enumerate(block):
            for number in by_source[source]:
                _, second, limit = limits[number]
                if lengths[nodes[second], column] < limit * (1.0 - _ROUNDING):
                    paths[number] = graph.path(lengths[:, column], nodes[second])
    return paths


class _BondGraph:
    """Lines of ``N`` nodes in all, a peptide bond after the other, with restraints between some nodes.

    Args:
        size: Number of nodes.
        starts: First node of each line.
        edges: Restraints of nodes.
    """

    def __init__(self, size: int, starts: Sequence[int], edges: Sequence[Edge]) -> None:
        self.edges: dict[int, list[Edge]] = defaultdict(list)  # by second node
        for edge in edges:
            self.edges[edge.second].append(edge)
            self.edges[edge.first].append(edge._replace(first=edge.second, second=edge.first))
        lines = np.repeat(np.arange(len(starts)), np.diff([*starts, size])).tolist()
        self.neighbors = [
            [
                (other, length)
                for step, length in ((1, STEP), (2, TWO_STEPS))
                for other in (node - step, node + step)
                if 0 <= other < size and lines[other] == lines[node]
            ]
            for node in range(size)
        ]

    def lengths_from(self, sources: Sequence[int], longest: float) -> np.ndarray:
        """Return lengths ``[N, S]`` float32 in Å of shortest paths from ``S`` nodes, exact up to ``longest``."""
        size = len(self.neighbors)
        lengths = np.full((size, len(sources)), np.inf, np.float32)
        lengths[sources, np.arange(len(sources))] = 0.0
        through = np.empty(len(sources), np.float32)
        while True:
            before = np.minimum(lengths, longest)
            for node in range(size):
                row = lengths[node]
                for other, length in self.neighbors[node]:
                    if other < node:
                        np.minimum(row, np.add(lengths[other], length, out=through), out=row)
                for edge in self.edges.get(node, ()):
                    np.minimum(row, np.add(lengths[edge.first], edge.length, out=through), out=row)
            for node in reversed(range(size)):
                row = lengths[node]
                for other, length in self.neighbors[node]:
                    if other > node:
                        np.minimum(row, np.add(lengths[other], length, out=through), out=row)
            if np.array_equal(before, np.minimum(lengths, longest)):
                return lengths

    def path(self, lengths: np.ndarray, end: int) -> ShortestPath:
        """Return the path to a node from the node with length 0, for lengths ``[N]`` of its paths."""
        node, numbers = end, list[int]()
        while lengths[node] > 0.0:
            options: list[tuple[float, int, int | None]] = [
                (lengths[other] + length, other, None) for other, length in self.neighbors[node]
            ]
            options += [
                (lengths[edge.first] + edge.length, edge.first, edge.restraint)
                for edge in self.edges.get(node, ())
            ]
            _, node, restraint = min(options, key=lambda option: option[0])
            numbers += [] if restraint is None else [restraint]
        return ShortestPath(float(lengths[end]), tuple(reversed(numbers)))
