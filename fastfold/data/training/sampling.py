"""Sampling probabilities of chains, and the endless order of draws (AlphaFold supplement, section 1.2.5).

The order is a function of the seed and the draw's number. Therefore a position is one number, and all processes agree
on it without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from fastfold.data.loading.loader import draw_rng
from fastfold.data.training.entry import Entry
from fastfold.errors import ConfigError

_STREAM = 1  # of draw_rng; stream 0 is for making samples


T = TypeVar("T")


def sampling_weights(entries: Sequence[Entry]) -> np.ndarray:
    """Compute relative probabilities ``[E]`` of entries: higher for longer chains, lower in large clusters.

    Each is ``max(min(N, 512), 256) / 512 / cluster_size`` times the entry's factor.
    """
    lengths = np.array([len(entry) for entry in entries], np.float64)
    sizes = np.array([entry.cluster_size for entry in entries], np.float64)
    factors = np.array([entry.weight for entry in entries], np.float64)
    return np.clip(lengths, 256, 512) / 512 / np.maximum(sizes, 1) * factors


class WeightedOrder(Generic[T]):
    """Endless order of entries for :class:`fastfold.data.loading.loader.SampleLoader`.

    The ``E`` draws of a round correspond to ``E`` equal parts of the total weight, in random order. An entry with ``k``
    parts occurs ``k`` times in each round, rounded up or down.

    Args:
        sets: For each set its entries, their weights ``[E]``, and its share of all draws, relative to the sum of the
            shares.
        seed: Random seed, nonnegative.

    Raises:
        ConfigError: All sets are empty, a weight or share is negative or not finite, or the seed is negative.
    """

    def __init__(self, sets: Sequence[tuple[Sequence[T], np.ndarray, float]], seed: int) -> None:
        draw_rng(seed, 0)  # checks the seed
        parts = []
        for entries, weights, share in sets:
            weights = np.asarray(weights, np.float64)
            if weights.shape != (len(entries),):
                raise ConfigError(f"{len(entries)} entries, but weights of shape {weights.shape}")
            if not np.isfinite(weights).all() or (weights < 0).any() or not 0 <= share < np.inf:
                raise ConfigError("sampling weights and shares must be finite and nonnegative")
            if share > 0 and not weights.sum() > 0:
                raise ConfigError("a set to draw from is empty, or all its weights are zero")
            parts.append(weights * (share / weights.sum()) if share > 0 else np.zeros_like(weights))
        if not any(share > 0 for *_, share in sets):
            raise ConfigError("all shares are zero: give a set a positive share")
        self._sets = [entries for entries, *_ in sets]
        self._ends = np.cumsum([len(entries) for entries in self._sets])
        self.probabilities = np.concatenate(parts)
        """``[E]`` float64 over all sets in order, with sum 1."""
        self.probabilities /= self.probabilities.sum()
        self._cumulative = np.cumsum(self.probabilities)
        self._last = int(np.flatnonzero(self.probabilities)[-1])
        self._seed = seed
        self._round: tuple[int, np.ndarray] = (-1, np.zeros(0))

    def index(self, number: int) -> int:
        """Return the index of a draw's entry, over all sets in order."""
        turn, place = divmod(number, len(self._cumulative))
        if self._round[0] != turn:
            self._round = (turn, self._points(turn))
        point = self._round[1][place]
        # Rounding may leave the sum below the largest point; entries of weight zero are never drawn.
        index = int(np.searchsorted(self._cumulative, point * self._cumulative[-1], side="right"))
        return min(index, self._last)

    def _points(self, turn: int) -> np.ndarray:
        """Return ``[E]`` points in [0, 1), one in each of ``E`` equal parts, in random order."""
        size = len(self._cumulative)
        rng = draw_rng(self._seed, turn, stream=_STREAM)
        places = np.argsort(rng.random(size), kind="stable")
        return (places + rng.random()) / size

    def __call__(self, number: int) -> T:
        index = self.index(number)
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._sets[which][index - (int(self._ends[which - 1]) if which else 0)]
