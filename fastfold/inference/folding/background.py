"""Process that draws and relaxes finished predictions while the next target folds."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from fastfold.data.loading.worker_process import PROTOCOL, describe_end, describe_failure, receive, send, work
from fastfold.errors import FastFoldError

PLOTS = ("matplotlib.figure", "matplotlib.backends.backend_agg")
"""Modules that plots need."""


class BackgroundWork(NamedTuple):
    """Call of a function in the other process.

    Attributes:
        function: Function of a module.
        arguments: Its picklable arguments.
        options: Its picklable arguments by name.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> Any:
        """Call the function here."""
        return self.function(*self.arguments, **self.options)


class Background:
    """Process that calls functions one after the other, started at once.

    Its errors are raised by the results. If the process cannot start, calls run in a thread of this one.

    Args:
        modules: Modules that it imports while it waits.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._thread.submit(self._start)
        self._thread.submit(self._call, BackgroundWork(_import_all, (tuple(modules),), {}))

    def submit(self, call: BackgroundWork) -> Future[Any]:
        """Return the future result of a call."""
        return self._thread.submit(self._call, call)

    def close(self) -> None:
        """End the process at once, and drop calls that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown()
        if self._pipe is not None:
            self._pipe.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work,
            args=(theirs, pickle.dumps(_answer, protocol=PROTOCOL)),
            name="fastfold-background",
            daemon=True,
        )
        try:
            process.start()
        finally:
            theirs.close()
        self._process = process
        receive(ours)  # it is ready
        self._pipe = ours

    def _call(self, call: BackgroundWork) -> Any:
        if self._pipe is None:
            return call.run()
        process, pipe = self._process, self._pipe
        try:
            send(pipe, (0, call))
            wait([pipe, process.sentinel])
            _, answer, failure = receive(pipe)
        except (EOFError, OSError):
            self._pipe = None
            raise FastFoldError(
                f"the process that draws and relaxes ended: {describe_end(process)}"
            ) from None
        if failure is not None:
            raise FastFoldError(failure)
        result, error = answer
        if error is not None:
            raise error
        return result


def _answer(_: int, call: BackgroundWork) -> tuple[Any, Exception | None]:
    """Return the result of a call, or its error."""
    try:
        return call.run(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some exceptions cannot be rebuilt from their arguments
            return None, FastFoldError(describe_failure(error))
        return None, error


def _import_all(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
