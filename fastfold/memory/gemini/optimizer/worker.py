"""Thread that lives while it has tasks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Worker:
    """Runner of functions in a thread, in order, until one raises.

    Args:
        name: Name of the thread.
        limit: Units of work that may wait; :meth:`put` blocks above it.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._tasks: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, task: Callable[[], None], size: int) -> None:
        """Queue a function.

        Args:
            task: Function to run.
            size: Its units of work.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting <= self._limit)
            self._tasks.append((task, size))
            self._waiting += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._process_tasks, name=self._name)
                self._thread.start()

    def finish(self) -> BaseException | None:
        """Wait for all tasks and the end of the thread.

        Returns:
            Exception of the first failed task, which is then cleared; None if none failed.
        """
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        return error

    def _process_tasks(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._thread = None
                    return
                task, size = self._tasks.popleft()
            if self._error is None:
                try:
                    task()
                except BaseException as error:
                    self._error = error
            del task  # refers to gradients
            with self._changed:
                self._waiting -= size
                self._changed.notify_all()
