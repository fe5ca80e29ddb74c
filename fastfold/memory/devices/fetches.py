"""Asynchronous copies of gradients to the host."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from fastfold.memory.devices.tiers import Tier

# Bytes that may be in staging buffers at a time.
_WAITING = 1 << 28


class _Fetch:
    """Queued copy; see :meth:`Fetches.put`."""

    def __init__(
        self, event: torch.cuda.Event | None, staged: Tensor | None, target: Tensor, add: bool, to: Tier
    ) -> None:
        self._event, self._staged, self._add, self._to = event, staged, add, to
        self.target = target
        self.waiting = 0 if staged is None else staged.nbytes
        # A sum must wait until its target is written.
        self._begun = None if add or staged is None else to.in_thread(self._put)

    def put(self) -> None:
        """Wait until the data are in the target."""
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
    """Queue of copies that start and finish in the same order.

    A copy that is added to its target, or whose target is not pinned, goes through a staging buffer. When the staging
    buffers exceed their limit, the oldest copy is finished.
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
        """Add a queued copy.

        A copy without ``staged`` goes to ``target`` directly; one without ``event`` has ended.
        """
        self._queue.append(_Fetch(event, staged, target, add, to))
        self._waiting += self._queue[-1].waiting
        while self._waiting > _WAITING and len(self._queue) > 1:
            self._finish()

    def finish(self) -> None:
        """Finish all copies."""
        while self._queue:
            self._finish()

    def _finish(self) -> None:
        fetch = self._queue.popleft()
        self._waiting -= fetch.waiting
        fetch.put()
