"""Filter the chains of a training set by quality (AlphaFold supplement, section 1.2.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastfold.data.training.entry import DISTILLATION, Entry, read_entry, resolved_share
from fastfold.errors import ConfigError, InputError


@dataclass(frozen=True)
class Filters:
    """Bounds on chains."""

    #: Largest resolution in Å. Chains of unknown resolution (NMR, predictions, tables without it) are kept.
    max_resolution: float = 9.0
    max_single_residue: float = 0.8  #: Largest share of one residue type in the sequence
    min_length: int = 1  #: Smallest number of residues
    max_length: int | None = None  #: Largest number of residues, or None
    min_resolved: float = 0.0  #: Smallest share of residues whose CA has a position; 0 reads no structures
    #: ``YYYY-MM-DD``, or None. An experimental structure must have a date, not later than this.
    max_release_date: str | None = None


@dataclass(frozen=True)
class Filtered:
    """Result of filters."""

    entries: Sequence[Entry]  #: Remaining entries
    #: Number of chains that each filter removed, by its description, including zeros. A chain that several filters
    #: would remove counts for the first.
    taken: dict[str, int]
    unreadable: tuple[tuple[str, str], ...]  #: Names and reasons of chains whose structure could not be read

    def summary(self) -> str:
        """Summarise in one line the remaining chains, and the number removed by each filter."""
        took = ", ".join(f"{name} took {count}" for name, count in self.taken.items() if count)
        return f"{len(self.entries)} chains are left" + (f" ({took})" if took else "")


def _share_read(entry: Entry) -> float:
    return resolved_share(read_entry(entry).chain)


def apply_filters(
    entries: Sequence[Entry], filters: Filters, *, resolved: Callable[[Entry], float] = _share_read
) -> Filtered:
    """Remove the chains outside of the bounds.

    Raises:
        ConfigError: No chain remains; has the number removed by each filter.
    """
    checks = dict(_checks(filters))
    taken = dict.fromkeys(checks, 0)
    left: list[Entry] = []
    unreadable: list[tuple[str, str]] = []
    needed = f"resolved residues >= {filters.min_resolved:g}"
    if filters.min_resolved > 0:
        taken |= {needed: 0, "readable files": 0}
    for entry in entries:
        failed = next((name for name, passes in checks.items() if not passes(entry)), None)
        if failed is None and filters.min_resolved > 0:
            try:
                share = resolved(entry) if entry.resolved is None else entry.resolved
                failed = needed if share < filters.min_resolved else None
            except InputError as error:
                failed = "readable files"
                unreadable.append((entry.id, str(error)))
        if failed is None:
            left.append(entry)
        else:
            taken[failed] += 1
    if not left:
        took = "; ".join(f"{name}: {count}" for name, count in taken.items() if count)
        raise ConfigError(
            f"no chain is left to train on: the filters took all {len(entries)} ({took}); relax them "
            "or add structures"
            if entries
            else "the training set contains no chain; check the data folder"
        )
    return Filtered(tuple(left), taken, tuple(unreadable))


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
    last = filters.max_release_date
    if last is not None:
        yield "a known release date", lambda entry: entry.source == DISTILLATION or bool(entry.release_date)
        yield (
            f"released until {last}",
            lambda entry: entry.source == DISTILLATION or entry.release_date <= last,
        )


def largest_share(sequence: str) -> float:
    """Compute the share of the most frequent letter of a sequence; 1 for an empty one."""
    return max((sequence.count(letter) for letter in set(sequence)), default=1) / max(len(sequence), 1)
