"""Gradients on their way to the host, while the device goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from fastfold.memory.devices.tiers import Tier

# Bytes that may wait in staging buffers.
_WAITING = 1 << 28


class _Fetch:
    """A copy that has been queued; see :meth:`Fetches.put`."""

    def __init__(
        self, event: torch.cuda.Event | None, staged: Tensor | None, target: Tensor, add: bool, to: Tier
    ) -> None:
        self._event, self._staged, self._add, self._to = event, staged, add, to
        self.target = target
        self.waiting = 0 if staged is None else staged.nbytes
        # Sums come after what they are added to.
        self._begun = None if add or staged is None else to.in_thread(self._put)

    def put(self) -> None:
        """It is in its place after this."""
        if self._begun is None:
            self._put()
        else:
            self._begun.result()

    def _put(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        if self._staged is None:
            return
        with torch.no_grad():
            if self._add:
                self.target.add_(self._staged)
            else:
                self._to.write(self.target, self._staged)


class Fetches:
    """Copies that leave in one order and end in it.

    What cannot go to its place at once, because it is added to what is there or because the place is not pinned, waits
    in a buffer of its own. When too much waits, the oldest is put in its place.
    """

    def __init__(self) -> None:
        self._queue: deque[_Fetch] = deque()
        self._waiting = 0

    def put(
        self,
        target: Tensor,
        *,
        staged: Tensor | None = None,
        add: bool,
        event: torch.cuda.Event | None,
        to: Tier,
    ) -> None:
        """A copy has been queued.

        Args:
            target: Where it shall be in the end, on the host.
            staged: Where it is going to; None if that is ``target``.
            add: Whether it is added to what is in ``target``.
            event: What the copy ends with; None if it is done.
            to: Where ``target`` lies.
        """
        self._queue.append(_Fetch(event, staged, target, add, to))
        self._waiting += self._queue[-1].waiting
        while self._waiting > _WAITING and len(self._queue) > 1:
            self._finish()

    def finish(self) -> None:
        """Everything is in its place after this."""
        while self._queue:
            self._finish()

    def hand_over(self, buffer: Tensor) -> Callable[[], None]:
        """Let somebody else put in place what goes to a buffer.

        Args:
            buffer: On the host; targets are views of it.

        Returns:
            A function that does so when it is called, in any thread.
        """
        storage = buffer.untyped_storage()._cdata
        taken, left = deque[_Fetch](), deque[_Fetch]()
        for fetch in self._queue:
            (taken if fetch.target.untyped_storage()._cdata == storage else left).append(fetch)
        self._queue = left
        self._waiting -= sum(fetch.waiting for fetch in taken)

        def put_all() -> None:
            while taken:
                taken.popleft().put()

        return put_all

    def _finish(self) -> None:
        fetch = self._queue.popleft()
        self._waiting -= fetch.waiting
        fetch.put()
