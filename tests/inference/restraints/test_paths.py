"""Shortest paths over chains and restraints are those of an algorithm on all residues, and quick."""

from __future__ import annotations

import heapq
import math
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.restraints.bounds import check_bounds
from fastfold.inference.restraints.paths import Edge, chain_span, shorter_paths
from fastfold.inference.restraints.residues import Residues
from fastfold.inference.restraints.restraint import Restraint


def dijkstra(graph: dict[int, dict[int, float]], start: int) -> dict[int, float]:
    lengths: dict[int, float] = {}
    queue = [(0.0, start)]
    while queue:
        length, node = heapq.heappop(queue)
        if node not in lengths:
            lengths[node] = length
            for other, step in graph[node].items():
                heapq.heappush(queue, (length + step, other))
    return lengths


@pytest.mark.parametrize("seed", range(20))
def test_paths_are_dijkstra_s(seed: int) -> None:
    """Three chains with gaps; every pair of residues in a chain is joined by its span."""
    rng = np.random.default_rng(seed)
    numbers = [(chain, int(n)) for chain in range(3) for n in np.cumsum(rng.choice([1, 1, 1, 2, 9, 400], 12))]
    places = sorted(rng.choice(200, len(numbers), replace=False).tolist())
    separations = [b[1] - a[1] if a[0] == b[0] else None for a, b in pairwise(numbers)]
    edges = []
    for number in range(20):
        first, second = rng.choice(places, 2, replace=False).tolist()
        edges.append(Edge(first, second, float(rng.uniform(3, 20)), number))
    graph: dict[int, dict[int, float]] = {place: {} for place in places}
    for place, (chain, number) in zip(places, numbers, strict=True):
        for other, (other_chain, other_number) in zip(places, numbers, strict=True):
            if chain == other_chain and place != other:
                graph[place][other] = chain_span(abs(number - other_number))
    graph_of_chains = {place: dict(others) for place, others in graph.items()}
    for edge in edges:
        for a, b in ((edge.first, edge.second), (edge.second, edge.first)):
            graph[a][b] = min(graph[a].get(b, math.inf), edge.length)
    limits = [(*rng.choice(places, 2, replace=False).tolist(), float(rng.uniform(5, 60))) for _ in range(40)]
    by_number = {edge.restraint: edge for edge in edges}

    def span(one: int, other: int) -> float:
        return 0.0 if one == other else graph_of_chains[one].get(other, math.inf)

    for (first, second, limit), path in zip(
        limits, shorter_paths(places, separations, edges, limits), strict=True
    ):
        expected = dijkstra(graph, first).get(second, math.inf)
        if path is None:
            assert expected >= limit - 1e-6
            continue
        assert path.length == pytest.approx(expected)
        assert path.length < limit
        # The restraints of the path, with the chain between them, are as long.
        ends = {first: 0.0}
        for number in path.restraints:
            edge = by_number[number]
            ends = {
                far: min(length + span(end, near) + edge.length for end, length in ends.items())
                for near, far in ((edge.first, edge.second), (edge.second, edge.first))
            }
        total = min(length + span(end, second) for end, length in ends.items())
        assert total == pytest.approx(path.length)


def links(count: int, rng: np.random.Generator) -> list[Restraint]:
    """Return restraints within 10 Å of the distances in a random walk, each with both bounds."""
    walk = np.cumsum(rng.normal(size=(2000, 3)) * 2.0, 0)
    restraints: list[Restraint] = []
    while len(restraints) < count:
        a, b = rng.choice(2000, 2, replace=False).tolist()
        distance = float(np.linalg.norm(walk[a] - walk[b]))
        if 4 < distance < 60:
            low = max(distance - 10, 0.0)
            restraints.append(Restraint(a, b, low, distance + 10, line=f"line {len(restraints)}"))
    return restraints


@pytest.mark.long
def test_two_thousand_restraints_with_both_bounds_are_checked_in_a_second() -> None:
    residues = Residues(target_from_sequence("A" * 1000 + ":" + "G" * 1000))
    restraints = links(2000, np.random.default_rng(0))
    started = time.process_time()
    check_bounds(Path("links.csv"), restraints, residues)
    assert time.process_time() - started < 1.0
    wrong = [*restraints, Restraint(0, 1001, 900.0, math.inf, line="line far")]
    with pytest.raises(InputError, match="line far: min 900 is too large"):
        check_bounds(Path("links.csv"), wrong, residues)
