"""The cheapest schedule by exhaustive search, for a handful of chunks: what the planner is measured against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from fastfold.memory import Access


def optimal_traffic(
    trace: Sequence[Access], sizes: Mapping[int, int], budget: int, volatile: frozenset[int] = frozenset()
) -> float:
    """Fewest bytes loaded per cycle by any endless repetition of the schedule.

    The states are all subsets of the chunks. ``cost[s, t]`` is the cheapest cycle that begins with ``s`` resident and
    ends with ``t``; the cheapest mean over all closed walks (Karp 1978) is the answer.
    """
    chunks = sorted(sizes)
    states = [frozenset(c) for k in range(len(chunks) + 1) for c in combinations(chunks, k)]
    weight = np.array([sum(sizes[c] for c in s) for s in states])
    bits = np.array([sum(1 << chunks.index(c) for c in s) for s in states])
    # Bytes that come in going from one state to another, as of one access.
    enters = np.array([[sum(sizes[c] for c in b - a) for b in states] for a in states], dtype=float)
    cost = np.where(np.eye(len(states), dtype=bool), 0.0, np.inf)
    for access in trace:
        need = sum(1 << chunks.index(c) for c in access.chunks)
        allowed = ((bits & need) == need) & (weight + access.other <= budget)
        step = np.where(allowed[None, :], enters, np.inf)
        cost = np.array([(row[:, None] + step).min(axis=0) for row in cost])
    keep = np.array([states.index(s - volatile) for s in states])
    boundary = np.full_like(cost, np.inf)
    for column, target in enumerate(keep):
        boundary[:, target] = np.minimum(boundary[:, target], cost[:, column])
    return _cheapest_mean_cycle(boundary)


def _cheapest_mean_cycle(cost: np.ndarray) -> float:
    """Karp's minimum mean cycle; any state may begin."""
    count = len(cost)
    walks = [np.zeros(count)]
    for _ in range(count):
        walks.append((walks[-1][:, None] + cost).min(axis=0))
    last = walks[count]
    reachable = np.isfinite(last)
    ratios = [
        np.where(np.isfinite(w[reachable]), (last[reachable] - w[reachable]) / (count - k), -np.inf)
        for k, w in enumerate(walks[:count])
    ]
    return float(np.min(np.max(ratios, axis=0)))
