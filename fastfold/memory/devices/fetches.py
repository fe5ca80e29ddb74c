"""Gradients on their way to the host, while the device goes on."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

# Bytes that may wait in staging buffers.
_WAITING = 1 << 28


class Fetches:
    """Copies that leave in one order and end in it.

    What cannot go to its place at once, because it is added to what is there or because the place is not pinned, waits
    in a buffer of its own. When too much waits, the oldest is put in its place.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[torch.cuda.Event | None, Tensor | None, Tensor, bool]] = deque()
        self._waiting = 0

    def put(
        self, target: Tensor, *, staged: Tensor | None = None, add: bool, event: torch.cuda.Event | None
    ) -> None:
        """A copy has been queued.

        Args:
            target: Where it shall be in the end, on the host.
            staged: Where it is going to; None if that is ``target``.
            add: Whether it is added to what is in ``target``.
            event: What the copy ends with; None if it is done.
        """
        self._queue.append((event, staged, target, add))
        self._waiting += 0 if staged is None else staged.nbytes
        while self._waiting > _WAITING and len(self._queue) > 1:
            self._finish()

    def finish(self) -> None:
        """Everything is in its place after this."""
        while self._queue:
            self._finish()

    def _finish(self) -> None:
        event, staged, target, add = self._queue.popleft()
        if event is not None:
            event.synchronize()
        if staged is None:
            return
        self._waiting -= staged.nbytes
        with torch.no_grad():
            if add:
                target.add_(staged)
            else:
                target.copy_(staged)
