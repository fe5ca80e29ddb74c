"""Choice of one candidate for each residue, with the least sum of own and pairwise energies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_TEMPERATURES = (4.0, 2.0, 1.0, 0.5, 0.25)
_MAX_SWEEPS = 20
_LEAST_GAIN = 1e-9  #: Gain of energy below which a choice stays, so that sums in another order change nothing

Pairs = Mapping[tuple[int, int], np.ndarray]
"""Energies ``[K, L]`` between the candidates of residues ``i`` and ``j``, for pairs ``(i, j)`` with ``i < j``."""


def choose(own: Sequence[np.ndarray], pairs: Pairs) -> list[int]:
    """Return the chosen candidate of each residue, the same each time.

    A mean field, in which each residue sees the average of its neighbours, is cooled down (Koehl and Delarue, 1994).
    Then residues and pairs of neighbours take turns to choose their best candidates until none changes.

    Args:
        own: Energies ``[K]`` of each residue's candidates.
        pairs: Energies between candidates of two residues.
    """
    weights = [_boltzmann(energies, 1.0) for energies in own]
    neighbors = _neighbors(len(own), pairs)
    for temperature in _TEMPERATURES:
        for i, energies in enumerate(own):
            field = energies + sum(table @ weights[j] for j, table in neighbors[i])
            weights[i] = 0.5 * (weights[i] + _boltzmann(field, temperature))
    choice = [int(one.argmax()) for one in weights]
    fields = [
        energies + sum(table[:, choice[j]] for j, table in neighbors[i]) for i, energies in enumerate(own)
    ]
    table_min = {pair: float(table.min()) for pair, table in pairs.items()}
    changed, seen = (
        [0] * len(own),
        dict.fromkeys(pairs, -1),
    )  # numbers of changes, so that no pair is seen twice
    changes = 0

    def change(i: int, k: int) -> None:
        nonlocal changes
        changes += 1
        changed[i] = changes
        for j, table in neighbors[i]:
            fields[j] += table[k] - table[choice[i]]
            changed[j] = changes
        choice[i] = k

    for _ in range(_MAX_SWEEPS):
        before = changes
        for i, field in enumerate(fields):
            if field.min() < field[choice[i]] - _LEAST_GAIN:
                change(i, int(field.argmin()))
        for (i, j), table in pairs.items():
            if max(changed[i], changed[j]) <= seen[i, j]:
                continue
            seen[i, j] = changes
            first, second = fields[i] - table[:, choice[j]], fields[j] - table[choice[i]]
            enough = first[choice[i]] + second[choice[j]] + table[choice[i], choice[j]] - _LEAST_GAIN
            if first.min() + second.min() + table_min[i, j] >= enough:
                continue
            both = first[:, None] + second + table
            if both.min() < enough:
                k, m = np.unravel_index(int(both.argmin()), both.shape)
                change(i, int(k))
                change(j, int(m))
        if changes == before:
            break
    return choice


def energies_of_choice(choice: Sequence[int], own: Sequence[np.ndarray], pairs: Pairs) -> np.ndarray:
    """Return the energy ``[R]`` of each residue in a choice: its own, and those with all others.

    Args:
        choice: Number of the chosen candidate of each residue.
        own: Energies ``[K]`` of each residue's candidates.
        pairs: Energies between candidates of two residues.
    """
    energies = np.array([one[k] for one, k in zip(own, choice, strict=True)])
    for (i, j), table in pairs.items():
        energies[[i, j]] += table[choice[i], choice[j]]
    return energies


def _neighbors(count: int, pairs: Pairs) -> list[list[tuple[int, np.ndarray]]]:
    """Return each residue's neighbours, with energies ``[K, L]`` of its own and their candidates."""
    neighbors: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(count)]
    for (i, j), table in pairs.items():
        neighbors[i].append((j, table))
        neighbors[j].append((i, np.ascontiguousarray(table.T)))
    return neighbors


def _boltzmann(energies: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((energies.min() - energies) / temperature)
    return np.asarray(weights / weights.sum())
