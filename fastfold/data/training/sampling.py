"""Chains to draw: filters by quality, sampling probabilities, and the endless order of draws.

See AlphaFold's supplement, section 1.2.5. The order is a function of the seed and the draw's number. Therefore a
position is one number, and all processes agree on it without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from fastfold.data.loading.loader import draw_rng
from fastfold.data.templates.database import require_date
from fastfold.data.training.entry import (
    DISTILLATION,
    Entry,
    alignment_depth,
    chains_of,
    read_entry,
    resolved_share,
)
from fastfold.errors import ConfigError, InputError
from fastfold.utils.lazy import old_attributes

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
    parts occurs ``k`` times in each round, rounded up or down. Each of the ``sets`` has its entries, their weights
    ``[E]``, and its share of all draws, relative to the sum of the shares.

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


@dataclass(frozen=True)
class Filters:
    """Bounds on chains."""

    #: Largest resolution in Å. Chains of unknown resolution (NMR, predictions, tables without it) are kept.
    max_resolution: float = 9.0
    max_single_residue: float = 0.8  #: Largest share of one residue type in the sequence
    min_length: int = 1  #: Smallest number of residues
    max_length: int | None = None  #: Largest number of residues, or None
    #: Smallest number of alignment rows with the query, of every chain of a complex; 0 counts no rows
    min_rows: int = 0
    min_resolved: float = 0.0  #: Smallest share of residues whose CA has a position; 0 reads no structures
    #: ``YYYY-MM-DD``, or None. An experimental structure must have a date, not later than this.
    max_release_date: str | None = None


@old_attributes({"taken": "removed"})
@dataclass(frozen=True)
class Filtered:
    """Result of filters."""

    entries: Sequence[Entry]  #: Remaining entries
    #: Number of chains that each filter removed, by its description, including zeros. A chain that several filters
    #: would remove counts for the first.
    removed: dict[str, int]
    unreadable: tuple[tuple[str, str], ...]  #: Names and reasons of chains whose structure could not be read

    def summary(self) -> str:
        """Summarise in one line the remaining chains, and the number removed by each filter."""
        took = ", ".join(f"{name} took {count}" for name, count in self.removed.items() if count)
        return f"{len(self.entries)} chains are left" + (f" ({took})" if took else "")


def _share_read(entry: Entry) -> float:
    return resolved_share(read_entry(entry).chain)


def apply_filters(
    entries: Sequence[Entry], filters: Filters, *, resolved: Callable[[Entry], float] = _share_read
) -> Filtered:
    """Remove the chains outside of the bounds.

    Raises:
        ConfigError: No chain remains, with the number removed by each filter; or the date is not one.
    """
    checks = dict(_checks(filters))
    removed = dict.fromkeys(checks, 0)
    left: list[Entry] = []
    unreadable: list[tuple[str, str]] = []
    # These read files, so they come last.
    of_files = dict(_checks_of_files(filters, resolved))
    if of_files:
        removed |= dict.fromkeys((*of_files, "readable files"), 0)
    for entry in entries:
        failed = next((name for name, passes in checks.items() if not passes(entry)), None)
        if failed is None:
            try:
                failed = next((name for name, passes in of_files.items() if not passes(entry)), None)
            except InputError as error:
                failed = "readable files"
                unreadable.append((entry.id, str(error)))
        if failed is None:
            left.append(entry)
        else:
            removed[failed] += 1
    if not left:
        took = "; ".join(f"{name}: {count}" for name, count in removed.items() if count)
        raise ConfigError(
            f"no chain is left to train on: the filters took all {len(entries)} ({took}); relax them "
            "or add structures"
            if entries
            else "the training set contains no chain; check the data folder"
        )
    return Filtered(tuple(left), removed, tuple(unreadable))


def _checks(filters: Filters) -> Iterator[tuple[str, Callable[[Entry], bool]]]:
    """Yield names and conditions in the order of evaluation."""
    yield (
        f"resolution <= {filters.max_resolution:g} Å",
        lambda entry: entry.resolution is None or entry.resolution <= filters.max_resolution,
    )
    yield (
        f"single residue type <= {filters.max_single_residue:g}",
        lambda entry: largest_share(entry.sequence) <= filters.max_single_residue,
    )
    yield f"length >= {filters.min_length}", lambda entry: len(entry) >= filters.min_length
    longest = filters.max_length
    if longest is not None:
        yield f"length <= {longest}", lambda entry: len(entry) <= longest
    if filters.max_release_date is not None:
        last = require_date("max_release_date", filters.max_release_date).isoformat()
        yield "a known release date", lambda entry: entry.source == DISTILLATION or bool(entry.release_date)
        yield (
            f"released until {last}",
            lambda entry: entry.source == DISTILLATION or entry.release_date <= last,
        )


def _checks_of_files(
    filters: Filters, resolved: Callable[[Entry], float]
) -> Iterator[tuple[str, Callable[[Entry], bool]]]:
    """Yield names and conditions that may read an entry's files."""
    if filters.min_rows > 0:
        yield (
            f"alignment rows >= {filters.min_rows}",
            lambda entry: min(map(alignment_depth, chains_of(entry))) >= filters.min_rows,
        )
    if filters.min_resolved > 0:
        yield (
            f"resolved residues >= {filters.min_resolved:g}",
            lambda entry: (
                (resolved(entry) if entry.resolved is None else entry.resolved) >= filters.min_resolved
            ),
        )


def largest_share(sequence: str) -> float:
    """Compute the share of the most frequent letter of a sequence; 1 for an empty one."""
    return max((sequence.count(letter) for letter in set(sequence)), default=1) / max(len(sequence), 1)
