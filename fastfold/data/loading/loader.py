"""Samples for training, prepared in parallel and handed out in an order that can be repeated.

A *draw* is one position of an endless order of entries; its number is all that a sample's randomness may
depend on, together with the seed (:func:`draw_rng`), never the worker that happens to prepare it. With
``deterministic=True`` samples come in the order of their draws. Otherwise they come as they become ready, so
that one slow sample holds up nobody; the order that came about can be replayed exactly.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastfold.data.loading.sampler_state import ConsumedDraws, merge_draws
from fastfold.data.loading.worker_pool import InlinePool, Outcome, WorkerDeath, WorkerPool
from fastfold.errors import ConfigError, InputError

Features = dict[str, np.ndarray]
MakeSample = Callable[[int, Any], Features]

_STATE_VERSION = 1
_PASSED_OVER = "passed over"  # its entry is quarantined already; the first reason stays


class Draw(NamedTuple):
    """A sample and where it comes from.

    Attributes:
        number: Its place in the order, over all ranks.
        id: Name of its entry.
        sample: What ``make_sample`` returned.
    """

    number: int
    id: str
    sample: Features


class ConsumedDraw(NamedTuple):
    """One line of the log by which an order is replayed: the draw's number and its entry's name."""

    number: int
    id: str


class _Planned(NamedTuple):
    """A draw on its way: its place in the plan and its entry's name."""

    place: int
    name: str


def draw_rng(seed: int, number: int, *, stream: int = 0) -> np.random.Generator:
    """The random numbers of a draw, a function of these three numbers alone.

    Args:
        seed: The run's seed, not negative.
        number: The draw's number, not negative.
        stream: Independent sequences for different purposes; 0 is for making samples.

    Raises:
        ConfigError: A number is negative.
    """
    if min(seed, number, stream) < 0:
        raise ConfigError(f"seed, draw and stream must not be negative, but are {seed}, {number}, {stream}")
    return np.random.default_rng([seed, number, stream])


def entry_name(entry: Any) -> str:
    """The entry's ``id`` where it has one, else the entry as text."""
    return str(getattr(entry, "id", entry))


class SampleLoader(Iterator[Draw]):
    """Hands out samples of an order of entries, prepared ahead by worker processes.

    Rank ``r`` of ``n`` takes the draws r, r + n, r + 2n, ... A sample that cannot be made is quarantined: its
    entry is listed with the reason and passed over from then on. Use the loader as a context manager, or call
    :meth:`close`; in a process that is killed the workers end by themselves.

    Args:
        make_sample: ``make_sample(number, entry)``; importable by its name if there are workers.
        order: The entry of each draw: a function of the draw's number, endless, or a sequence, whose end
            ends the iteration.
        workers: Processes that prepare samples; 0 prepares each one when it is asked for.
        prefetch: Prepared samples that may wait, in addition to those in preparation.
        deterministic: Hand samples out strictly in order, which makes a resumed run equal to one that was
            never interrupted. Otherwise as they become ready.
        window: Furthest that a sample may overtake another one, in draws of this rank.
        rank: This process, from 0.
        ranks: Number of processes that share the order.
        replay: Numbers of draws to hand out first, in exactly this order, whatever ``deterministic`` says;
            the others of the order follow. Draws that are consumed already are left out, so that a log that
            reaches back before the checkpoint can be given whole.
        name_of: An entry's name in logs.
        max_failures: Draws in a row without a sample after which it is an error.
        timeout_s: A sample that takes longer is given up (after a second try); None waits.

    Attributes:
        consumed: The draws handed out since the start or the last :meth:`take_consumed`.
        quarantined: Pairs of an entry's name and the reason, in the order in which they came up.
        waited_s: Seconds that the consumer has waited in total.

    Raises:
        ConfigError: An option is out of range, or ``make_sample`` cannot be sent to workers.
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
                f"the loader needs workers >= 0, prefetch >= 0, max_failures >= 1 and 0 <= rank < ranks, not "
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
        self._deaths: list[WorkerDeath] = []
        self._bad: dict[str, str] = {}
        self._suspect: dict[str, str] = {}
        self._failures_in_a_row = 0
        self._pool: WorkerPool | InlinePool | None = None
        self._plan_anew()

    # ---- the order -------------------------------------------------------------------------------------

    def _plan_anew(self) -> None:
        """Forgets what was on its way and plans from what is consumed."""
        self._plan = self._planned()
        self._coming: dict[int, _Planned] = {}  # by number, in the order of the plan
        self._next_place = 0
        self._ready: dict[int, Outcome] = {}  # in the order in which they became ready

    def _planned(self) -> Iterator[int]:
        """Numbers of all draws that are not consumed: those to replay, those left behind, all others."""
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
        """Submits draws until enough are on their way."""
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
                self._ready[number] = Outcome(number, None, _PASSED_OVER)
            else:
                self._running_pool().submit(number, entry)

    def _running_pool(self) -> WorkerPool | InlinePool:
        if self._pool is None:
            if self._workers:
                self._pool = WorkerPool(self._make_sample, self._workers, timeout_s=self._timeout_s)
                self._abandoned = weakref.finalize(self, self._pool.close)  # also when the program ends
            else:
                self._pool = InlinePool(self._make_sample)
        return self._pool

    def _take(self) -> tuple[str, Outcome]:
        """Name and outcome of the draw to hand out next; waits for it."""
        head, planned = next(iter(self._coming.items()))
        in_order = self._deterministic or planned.place < self._num_replayed
        while not self._ready or (in_order and head not in self._ready):
            outcome = self._running_pool().next_outcome()
            self._ready[outcome.key] = outcome
        number = head if in_order else next(iter(self._ready))
        return self._coming.pop(number).name, self._ready.pop(number)

    def __next__(self) -> Draw:
        """The next sample.

        Raises:
            InputError: ``max_failures`` draws in a row had no sample; names the first reasons.
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
                # Decided here and not when the failure came in: here the order is the same in every run.
                self._bad.setdefault(name, outcome.failure or _PASSED_OVER)
                self._suspect.pop(name, None)
                self._count_failure()
        finally:
            self.waited_s += time.perf_counter() - start
        self._failures_in_a_row = 0
        if self._workers:
            self._fill()  # they go on while the consumer computes
        self.consumed.append(ConsumedDraw(outcome.key, name))
        return Draw(outcome.key, name, outcome.value)

    def _count_failure(self) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._max_failures:
            reasons = "\n".join(f"  {name}: {reason}" for name, reason in list(self._bad.items())[:3])
            self.close()
            raise InputError(
                f"{self._failures_in_a_row} draws in a row gave no sample; {len(self._bad)} entries cannot be "
                f"used, the first of them:\n{reasons}\ncorrect or remove them"
            )

    # ---- what the trainer reads ------------------------------------------------------------------------

    @property
    def quarantined(self) -> list[tuple[str, str]]:
        """Entries that cannot be used, with the reasons; after a resume also those that could not be used before and
        have not been drawn again."""
        return [*self._suspect.items(), *self._bad.items()]

    @property
    def worker_deaths(self) -> list[WorkerDeath]:
        """Worker processes that ended unasked; each was replaced."""
        return self._deaths + (self._pool.deaths if self._pool else [])

    def take_consumed(self) -> list[ConsumedDraw]:
        """Empties :attr:`consumed` and returns what was in it, for the log."""
        taken, self.consumed = self.consumed, []
        return taken

    # ---- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is consumed, as plain numbers and texts that JSON can hold.

        Samples that are prepared but not handed out count as not consumed: after
        :meth:`load_state_dict` they are prepared again, so none is lost and none comes twice.
        """
        return {
            "version": _STATE_VERSION,
            **self._done.state(),
            "quarantined": [list(pair) for pair in self.quarantined],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the state was taken; what was prepared in the meantime is dropped.

        Quarantined entries are tried again when they are drawn, since somebody may have repaired their files. Those
        that still fail are quarantined again, so that a resumed run otherwise equals the uninterrupted one.

        Args:
            state: State of the same rank and number of ranks, or of :func:`merge_states` for any number of them.

        Raises:
            ConfigError: The state is one of another version, or of one of several other ranks.
        """
        _check_version(state)
        self._done.load(state)
        self._bad, self._suspect = {}, dict(state["quarantined"])
        self.close()
        self._plan_anew()

    def close(self) -> None:
        """Ends the workers; the next sample asked for starts them again."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.close()
            if isinstance(pool, WorkerPool):
                self._abandoned.detach()
            self._deaths += pool.deaths
            self._plan_anew()

    def __enter__(self) -> SampleLoader:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those of all ranks, from which any number of ranks can continue.

    Args:
        states: :meth:`SampleLoader.state_dict` of each rank, taken at the same step, in any order.

    Raises:
        ConfigError: The states are not those of all ranks of one run.
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
            f"a loader state of version {state.get('version')} cannot be read, only {_STATE_VERSION}; start a new run"
        )
