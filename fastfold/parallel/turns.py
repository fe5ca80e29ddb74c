"""Turns of the ranks: announcements over the store of the collective part that each rank begins.

A rank that leaves its loop early lets the others wait in a collective until it times out. So every rank announces a
backward pass and other collective parts before it begins them. A rank is refused if another one begins another part,
waits in another collective or has ended.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from contextlib import suppress
from typing import Literal, get_args

import torch.distributed as dist

from fastfold.errors import ConfigError

Kind = Literal[
    "forward()", "backward()", "reduce_gradients()", "state_dict()", "a training step", "a checkpoint"
]
_KINDS: tuple[Kind, ...] = get_args(Kind)

_PATIENCE = 10.0  #: Seconds to wait for the other ranks; then a collective waits, which notices ranks that were killed
_SILENCE = 3.0  #: The same for ranks that do not answer: they were killed, or wait in a part of their own
_LOOK_SECONDS = 0.5  #: Time between two looks at the other ranks

_REMEDY = (
    "every rank has to take the same steps: give all ranks as many batches (drop_last=True of DataLoader and "
    "DistributedSampler), or stop all ranks as soon as one has no batch left"
)


class Turns:
    """Numbered turns of this rank and of the others."""

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore("fastfold/turns", dist.distributed_c10d._get_default_store())
        self._number = 0
        self._caller = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="turns", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def take(self, kind: Kind) -> None:
        """Announce a part that all ranks begin together, and wait for the others.

        After some seconds without a reason the wait ends, because the part itself notices ranks that were killed.

        Raises:
            ConfigError: Another rank begins another part, waits in another collective or has ended.
        """
        self._number += 1
        number = self._number
        with suppress(dist.DistNetworkError):  # the store's process has ended, which the part itself notices
            if self._store.add(f"{number}/{kind}", 1) == self._size:
                self._store.set(f"{number}/arrived", "")
                for name in (*_KINDS, "arrived", "asked", "able"):
                    self._store.delete_key(f"{number - 1}/{name}")
                return
            start = time.monotonic()
            while not self._all_arrived(number):
                self._refuse(number, kind)
                self._store.set(f"{number}/asked", "")
                waited = time.monotonic() - start
                if waited > _PATIENCE or (waited > _SILENCE and self._is_silent(number, kind)):
                    return

    def _all_arrived(self, number: int) -> bool:
        """Wait for a turn to begin, until the next look."""
        end, pause = time.monotonic() + _LOOK_SECONDS, 1e-4
        while not self._store.check([f"{number}/arrived"]):
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def _is_silent(self, number: int, kind: Kind) -> bool:
        """Return True if a rank has neither begun a turn nor answered that it is able to."""
        return self._store.add(f"{number}/{kind}", 0) + self._store.add(f"{number}/able", 0) < self._size

    def _refuse(self, number: int, kind: Kind) -> None:
        others = [other for other in _KINDS if other != kind and self._store.check([f"{number}/{other}"])]
        reason = f"another rank begins {others[0]}" if others else self._reason(number)
        if reason:
            raise ConfigError(f"rank {self._rank} of {self._size} begins {kind}, but {reason}: {_REMEDY}")

    def _reason(self, number: int) -> str:
        """Return the reason for which a rank will not take a turn, or an empty text."""
        keys = (f"{number}/ended", f"{number}/waiting")
        return next((self._store.get(key).decode() for key in keys if self._store.check([key])), "")

    def close(self) -> None:
        """End the thread that answers other ranks."""
        self._ended.set()
        self._thread.join()
        atexit.unregister(self._end)

    def _end(self) -> None:
        """Announce the end of this process."""
        self.close()
        with suppress(RuntimeError):  # the store has ended before
            self._store.set(f"{self._number + 1}/ended", f"rank {self._rank} has ended")

    def _answer(self) -> None:
        """Tell ranks that ask where this one waits, or that it does not, from a thread of its own."""
        answered = 0
        with suppress(RuntimeError):
            while not self._ended.wait(2 * _LOOK_SECONDS):
                number = self._number + 1
                if not self._store.check([f"{number}/asked"]):
                    continue
                place = self._collective()
                if place is None and answered < number:
                    answered = number
                    self._store.add(f"{number}/able", 1)
                elif (
                    place and place[1] and not self._ended.wait(_LOOK_SECONDS) and place == self._collective()
                ):
                    self._store.set(f"{number}/waiting", f"rank {self._rank} waits in {place[1]}")

    def _has_all_ranks(self, group: object) -> bool:
        if group in (None, dist.group.WORLD):
            return True
        return isinstance(group, dist.ProcessGroup) and group.size() == self._size

    def _collective(self) -> tuple[int, str] | None:
        """Return the call of ``torch.distributed`` over all ranks that the program waits in, and its place.

        The place is empty in other groups of all ranks, whose collectives find out themselves.
        """
        frame, collective = sys._current_frames().get(self._caller), None
        while frame is not None:
            is_collective = frame.f_globals.get("__name__") == dist.distributed_c10d.__name__
            if is_collective and self._has_all_ranks(frame.f_locals.get("group")):
                collective = frame
            frame = frame.f_back
        if collective is None:
            return None
        if collective.f_locals.get("group") not in (None, dist.group.WORLD):
            return id(collective), ""
        caller = collective.f_back
        while caller is not None and str(caller.f_globals.get("__name__")).startswith("torch."):
            caller = caller.f_back
        place = f" ({caller.f_code.co_filename}, line {caller.f_lineno})" if caller else ""
        return id(collective), f"torch.distributed.{collective.f_code.co_name}(){place}"


_current: tuple[dist.ProcessGroup, Turns] | None = None


def take_turn(kind: Kind) -> None:
    """Announce a part that all ranks of the program begin together; see :meth:`Turns.take`.

    Nothing happens in a single process and in simulated ones.

    Raises:
        ConfigError: Another rank begins another part, waits in another collective or has ended.
    """
    global _current
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() not in ("gloo", "nccl"):
        return
    everyone = dist.group.WORLD
    assert everyone is not None
    if _current is None or _current[0] is not everyone:
        if _current is not None:
            _current[1].close()
        _current = everyone, Turns()
    _current[1].take(kind)
