"""Prepare training samples in parallel, in a reproducible order.

A *draw* is one position of an endless order of entries. A sample's random numbers depend only on its number and the
seed (:func:`draw_rng`), not on the worker. With ``deterministic=True`` samples are returned in the order of their
draws. Otherwise they are returned when they are ready, so that a slow sample does not delay others, and the resulting
order can be replayed.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fastfold.errors import ConfigError, InputError
from fastfold.utils.workers.pool import InlinePool, WorkerOutcome, WorkerPool

Features = dict[str, np.ndarray]
MakeSample = Callable[[int, Any], Features]

_STATE_VERSION = 1
_PASSED_OVER = "passed over"  # its entry is in quarantine already; the first reason is kept


class Draw(NamedTuple):
    """Sample with its origin."""

    number: int  #: Place in the order, over all ranks
    id: str  #: Name of its entry
    sample: Features  #: Result of ``make_sample``


class ConsumedDraw(NamedTuple):
    """Line of the log from which an order is replayed: number and entry name of a draw."""

    number: int
    id: str


class _Planned(NamedTuple):
    """Draw in preparation: its place in the plan and its entry's name."""

    place: int
    name: str


def draw_rng(seed: int, number: int, *, stream: int = 0) -> np.random.Generator:
    """Return the random generator of a draw, a function of three nonnegative numbers alone.

    These are the run's seed, the draw's number, and a ``stream`` of independent random numbers for each purpose; 0 is
    for making samples.

    Raises:
        ConfigError: A number is negative.
    """
    if min(seed, number, stream) < 0:
        raise ConfigError(f"seed, draw and stream must not be negative, but are {seed}, {number}, {stream}")
    return np.random.default_rng([seed, number, stream])


def entry_name(entry: Any) -> str:
    """Return the entry's ``id`` if it has one, otherwise the entry as text."""
    return str(getattr(entry, "id", entry))


class SampleLoader(Iterator[Draw]):
    """Iterator over samples of an order of entries, prepared in advance by worker processes.

    Rank ``r`` of ``n`` takes the draws r, r + n, r + 2n, ... A sample that cannot be made is put into quarantine: its
    entry is listed with the reason and skipped from then on. Use the loader as a context manager, or call
    :meth:`close`. If the process is killed, the workers end too.

    Args:
        make_sample: ``make_sample(number, entry)``; must be importable by its name if there are workers.
        order: Entry of each draw: an endless function of the draw's number, or a sequence, whose end ends the
            iteration.
        workers: Processes that prepare samples; 0 prepares each one on request.
        prefetch: Largest number of prepared samples that wait, in addition to those in preparation.
        deterministic: Return samples strictly in order, which makes a resumed run equal to an uninterrupted one.
            Otherwise return them when they are ready.
        window: Largest number of draws of this rank by which a sample may overtake another one.
        rank: Rank of this process, from 0.
        ranks: Number of processes that share the order.
        replay: Numbers of draws to return first, in exactly this order, regardless of ``deterministic``; the others
            follow. Consumed draws are skipped, so a log may begin before the checkpoint.
        name_of: Returns an entry's name in logs.
        max_failures: Number of consecutive draws without a sample that is an error.
        timeout_s: Limit in seconds for a sample, which is given up after a second try; None for no limit.

    Attributes:
        consumed: Draws returned since the start or the last :meth:`take_consumed`.
        quarantined: Pairs of an entry's name and the reason, in order of occurrence.
        waited_s: Total seconds that the consumer has waited.

    Raises:
        ConfigError: An option is out of range, or ``make_sample`` cannot be pickled for the workers.
    """

    def __init__(
        self,
        make_sample: MakeSample,
        order: Callable[[int], Any] | Sequence[Any],
        *,
        workers: int = 0,
        prefetch: int = 4,
        deterministic: bool = True,
        window: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        replay: Iterable[int] = (),
        name_of: Callable[[Any], str] = entry_name,
        max_failures: int = 100,
        timeout_s: float | None = None,
    ) -> None:
        if workers < 0 or prefetch < 0 or max_failures < 1 or not 0 <= rank < ranks:
            raise ConfigError(
                f"expected workers >= 0, prefetch >= 0, max_failures >= 1 and 0 <= rank < ranks, found "
                f"{workers}, {prefetch}, {max_failures}, {rank} and {ranks}"
            )
        self._make_sample, self._order, self._name_of = make_sample, order, name_of
        self._workers, self._timeout_s = workers, timeout_s
        self._capacity = workers + prefetch if workers else 1
        self._deterministic = deterministic
        self._window = max(window or 4 * self._capacity, 1)
        self._done = ConsumedDraws(rank, ranks)
        self._replay = list(dict.fromkeys(replay))
        foreign = [number for number in self._replay if number < 0 or number % ranks != rank]
        if foreign:
            raise ConfigError(
                f"draw {foreign[0]} of the order to replay does not belong to rank {rank} of {ranks}; give each "
                "rank the order that it recorded"
            )
        self._max_failures = max_failures
        self.consumed: list[ConsumedDraw] = []
        self.waited_s = 0.0
        self._bad: dict[str, str] = {}
        self._suspect: dict[str, str] = {}
        self._failures_in_a_row = 0
        self._pool: WorkerPool | InlinePool | None = None
        self._plan_anew()

    # ---- the order -------------------------------------------------------------------------------------

    def _plan_anew(self) -> None:
        """Drop the samples in preparation, and plan again from the consumed draws."""
        self._plan = self._planned()
        self._coming: dict[int, _Planned] = {}  # by number, in the order of the plan
        self._next_place = 0
        self._ready: dict[int, WorkerOutcome] = {}  # in the order of completion

    def _planned(self) -> Iterator[int]:
        """Yield the numbers of all draws that are not consumed: replayed, skipped and later ones."""
        replayed = [number for number in self._replay if number not in self._done]
        self._num_replayed = len(replayed)
        yield from replayed
        seen = set(replayed)
        for number in self._done.rest():
            if isinstance(self._order, Sequence) and number >= len(self._order):
                return
            if number not in seen:
                yield number

    def _fill(self) -> None:
        """Submit draws until enough are in preparation."""
        while len(self._coming) < self._capacity:
            if self._coming and self._next_place - next(iter(self._coming.values())).place >= self._window:
                return
            number = next(self._plan, None)
            if number is None:
                return
            entry = self._order[number] if isinstance(self._order, Sequence) else self._order(number)
            name = self._name_of(entry)
            self._coming[number] = _Planned(self._next_place, name)
            self._next_place += 1
            if name in self._bad:
                self._ready[number] = WorkerOutcome(number, None, _PASSED_OVER)
            else:
                self._running_pool().submit(number, entry)

    def _running_pool(self) -> WorkerPool | InlinePool:
        if self._pool is None:
            if self._workers:
                self._pool = WorkerPool(self._make_sample, self._workers, timeout_s=self._timeout_s)
                self._abandoned = weakref.finalize(self, self._pool.close)  # also at the end of the program
            else:
                self._pool = InlinePool(self._make_sample)
        return self._pool

    def _take(self) -> tuple[str, WorkerOutcome]:
        """Wait for the next draw; return its name and outcome."""
        head, planned = next(iter(self._coming.items()))
        in_order = self._deterministic or planned.place < self._num_replayed
        while not self._ready or (in_order and head not in self._ready):
            outcome = self._running_pool().next_outcome()
            self._ready[outcome.key] = outcome
        number = head if in_order else next(iter(self._ready))
        return self._coming.pop(number).name, self._ready.pop(number)

    def __next__(self) -> Draw:
        """Return the next sample.

        Raises:
            InputError: ``max_failures`` consecutive draws had no sample; names the first reasons.
            ConfigError: The workers cannot start.
        """
        start = time.perf_counter()
        try:
            while True:
                self._fill()
                if not self._coming:
                    self.close()
                    raise StopIteration
                name, outcome = self._take()
                self._done.add(outcome.key)
                if outcome.failure is None and name not in self._bad:
                    self._suspect.pop(name, None)
                    break
                # Decided here and not at the failure, because here the order is the same in every run.
                self._bad.setdefault(name, outcome.failure or _PASSED_OVER)
                self._suspect.pop(name, None)
                self._count_failure()
        finally:
            self.waited_s += time.perf_counter() - start
        self._failures_in_a_row = 0
        if self._workers:
            self._fill()  # the workers continue while the consumer computes
        self.consumed.append(ConsumedDraw(outcome.key, name))
        return Draw(outcome.key, name, outcome.value)

    def _count_failure(self) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._max_failures:
            reasons = "\n".join(f"  {name}: {reason}" for name, reason in list(self._bad.items())[:3])
            self.close()
            raise InputError(
                f"{self._failures_in_a_row} draws in a row gave no sample; {len(self._bad)} entries are unusable, the "
                f"first of them:\n{reasons}\ncorrect or remove them"
            )

    # ---- results for the trainer ------------------------------------------------------------------------

    @property
    def quarantined(self) -> list[tuple[str, str]]:
        """Unusable entries with the reasons; after a resume also earlier ones that were not drawn again."""
        return [*self._suspect.items(), *self._bad.items()]

    def take_consumed(self) -> list[ConsumedDraw]:
        """Return and clear :attr:`consumed`, for the log."""
        draws, self.consumed = self.consumed, []
        return draws

    # ---- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the consumed draws as plain numbers and texts for JSON.

        Samples that are prepared but not returned do not count as consumed. After :meth:`load_state_dict` they are
        prepared again, so none is lost and none is repeated.
        """
        return {
            "version": _STATE_VERSION,
            **self._done.state(),
            "quarantined": [list(pair) for pair in self.quarantined],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state and drop the samples prepared since.

        Entries in quarantine are tried again when they are drawn, because their files may have been repaired. If they
        still fail, they return to quarantine, so that the resumed run equals the uninterrupted one.

        Raises:
            ConfigError: The state has another version, or belongs to another rank.
        """
        _check_version(state)
        self._done.load(state)
        self._bad, self._suspect = {}, dict(state["quarantined"])
        self.close()
        self._plan_anew()

    def close(self) -> None:
        """End the workers; the next request starts them again."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.close()
            if isinstance(pool, WorkerPool):
                self._abandoned.detach()
            self._plan_anew()

    def __enter__(self) -> SampleLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks at one step, for a resume with any number of ranks.

    Raises:
        ConfigError: The states do not belong to all ranks of one run.
    """
    for state in states:
        _check_version(state)
    quarantined = {name: reason for state in states for name, reason in state["quarantined"]}
    return {
        "version": _STATE_VERSION,
        **merge_draws(states),
        "quarantined": [list(pair) for pair in quarantined.items()],
    }


def _check_version(state: Mapping[str, Any]) -> None:
    if state.get("version") != _STATE_VERSION:
        raise ConfigError(
            f"expected a loader state of version {_STATE_VERSION}, found {state.get('version')}; start a new run"
        )


WAITS_S = (1.0, 4.0)  #: Seconds before each further try

T = TypeVar("T")

_log = logging.getLogger(__name__)


def retry_io(function: Callable[[], T]) -> T:
    """Call a function, again if a file could not be read for a temporary reason.

    Raises:
        InputError: A file is invalid, or could not be read in any try.
        OSError: A file could not be read in any try.
    """
    for wait in WAITS_S:
        try:
            return function()
        except (InputError, OSError) as error:
            if isinstance(error, InputError) and not error.temporary:
                raise
            _log.warning("%s; reading it again in %g s", error, wait)
            time.sleep(wait)
    return function()


class ConsumedDraws:
    """Consumed draws of rank ``r`` of ``n``, which takes r, r + n, r + 2n, ...

    All draws before a frontier are consumed, with listed exceptions.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._frontier = rank
        self._open: set[int] = set()

    def add(self, number: int) -> None:
        """Mark a draw of this rank as consumed; it must not be consumed already."""
        if number < self._frontier:
            self._open.remove(number)
        else:
            self._open.update(range(self._frontier, number, self._ranks))
            self._frontier = number + self._ranks

    def __contains__(self, number: int) -> bool:
        return number < self._frontier and number not in self._open

    def rest(self) -> Iterator[int]:
        """Yield all other draws of this rank endlessly, in order, as of the first request."""
        number = self._frontier
        yield from sorted(self._open)
        while True:
            yield number
            number += self._ranks

    def state(self) -> dict[str, Any]:
        """Return the state as plain numbers for JSON."""
        return {
            "rank": self._rank,
            "ranks": self._ranks,
            "frontier": self._frontier,
            "open": sorted(self._open),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state of this rank, or the merged one of all ranks.

        Raises:
            ConfigError: The state belongs to another rank, or to another number of ranks.
        """
        if state["ranks"] != 1 and (state["rank"], state["ranks"]) != (self._rank, self._ranks):
            raise ConfigError(
                f"a loader state of rank {state['rank']} of {state['ranks']} cannot continue as rank {self._rank} "
                f"of {self._ranks}; merge the states of all ranks first"
            )
        frontier = state["frontier"]
        # The first draw of this rank after the state's frontier.
        self._frontier = frontier + (self._rank - frontier) % self._ranks
        self._open = {number for number in state["open"] if number % self._ranks == self._rank}


def merge_draws(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks to one that has consumed their draws.

    Raises:
        ConfigError: The states do not belong to all ranks of one run.
    """
    ranks = len(states)
    if sorted((state["rank"], state["ranks"]) for state in states) != [(r, ranks) for r in range(ranks)]:
        ranks_of_states = ", ".join(f"{state['rank']} of {state['ranks']}" for state in states) or "none"
        raise ConfigError(f"expected the states of all ranks of one run, found rank {ranks_of_states}")
    end = max((state["frontier"] for state in states), default=0)
    left = {number for state in states for number in state["open"]}
    for state in states:
        left.update(range(state["frontier"], end, ranks))
    # Ranks with equal numbers of draws leave gaps only at the end, which need not be listed.
    while end > 0 and end - 1 in left:
        end -= 1
        left.remove(end)
    return {"rank": 0, "ranks": 1, "frontier": end, "open": sorted(left)}
