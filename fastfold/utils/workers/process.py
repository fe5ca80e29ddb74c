"""Main loop of a worker process, and its messages to the pool.

This module imports nothing that starts threads, so a worker can limit the threads of libraries that it loads later.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from fastfold.errors import FastFoldError

Function = Callable[[int, Any], Any]

PROTOCOL = 5
# Arrays are sent in pieces that fit into the processor's cache, which is faster than one piece.
_PIECE = 1 << 18
_POLL_S = 0.2
_GRACE_S = 1.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Packed(NamedTuple):
    """Message ready to be sent."""

    head: bytes  #: Pickled message without its arrays, and their sizes
    buffers: list[memoryview]  #: Memory of the arrays


def pack(message: Any) -> Packed:
    """Pickle a message without the contents of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=PROTOCOL, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    return Packed(pickle.dumps((body, [part.nbytes for part in raw]), protocol=PROTOCOL), raw)


def send_packed(pipe: Connection, message: Packed) -> None:
    """Send a message, or raise OSError if the other process has ended."""
    pipe.send_bytes(message.head)
    for buffer in message.buffers:
        for start in range(0, buffer.nbytes, _PIECE):
            pipe.send_bytes(buffer[start : start + _PIECE])


def send(pipe: Connection, message: Any) -> None:
    """Pack and send a message."""
    send_packed(pipe, pack(message))


def receive(pipe: Connection) -> Any:
    """Receive a message of :func:`send`, or raise EOFError or OSError if the other process has ended."""
    body, sizes = pickle.loads(pipe.recv_bytes())
    buffers = []
    for size in sizes:
        buffer = bytearray(size)
        start = 0
        while start < size:
            start += pipe.recv_bytes_into(buffer, start)
        buffers.append(buffer)
    return pickle.loads(body, buffers=buffers)


def describe_failure(error: BaseException) -> str:
    """Describe an exception in one line: FastFold's by their message, others with type and place."""
    if isinstance(error, FastFoldError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split()) + place


def describe_end(process: Any, grace_s: float = 1.0) -> str:
    """Describe how a process ended."""
    process.join(grace_s)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
        return "it closed its connection"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; by the system, if memory ran out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def ignore_signals() -> None:
    """Ignore the signals that batch systems and terminals send to all processes of a job."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def limit_threads() -> None:
    """Limit libraries that are imported later to one thread, because the workers share the cores."""
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = "1"


def pack_function(function: Callable[..., Any]) -> bytes:
    """Pickle a function for :class:`FunctionProcess`."""
    return pickle.dumps(function, protocol=PROTOCOL)


class ProcessEnded(Exception):
    """End of a process instead of an answer; tells how it ended."""


class LimitPassed(ProcessEnded):
    """End of a process that was killed, because its task had passed a limit."""


class FunctionProcess:
    """Process that runs a packed function on one task after the other, for one thread at a time.

    Its first answer tells whether it has loaded the function. ``context`` is one of ``multiprocessing``.
    """

    def __init__(self, context: Any, function: bytes, name: str, *, daemon: bool = True) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, function), name=name, daemon=daemon)
        try:
            self.process.start()
        finally:
            theirs.close()

    def call(
        self, key: int, argument: Any, passed_limit: Callable[[], str] | None = None
    ) -> tuple[Any, str | None]:
        """Run ``function(key, argument)``; return its value and its failure, errors as of :meth:`answer`."""
        message = pack((key, argument))
        try:
            send_packed(self._pipe, message)
        except OSError:
            raise ProcessEnded(describe_end(self.process)) from None
        del message  # frees its memory while the process works
        return self.answer(passed_limit)

    def answer(self, passed_limit: Callable[[], str] | None = None) -> tuple[Any, str | None]:
        """Wait for the next answer; return its value, and its failure or None.

        ``passed_limit`` is asked for a limit that the task has passed, in words, and the process is then killed.

        Raises:
            ProcessEnded: The process ended, or was killed (:class:`LimitPassed`).
        """
        while not wait([self._pipe, self.process.sentinel], None if passed_limit is None else _POLL_S):
            if passed_limit is not None and (limit := passed_limit()):
                self.process.kill()
                raise LimitPassed(limit)
        try:
            _, value, failure = receive(self._pipe)
        except (EOFError, OSError):
            raise ProcessEnded(describe_end(self.process)) from None
        return value, failure

    def kill(self) -> None:
        """End the process at once, from any thread."""
        self.process.kill()

    def end(self) -> None:
        """End an idle process, and wait for the end of a killed one."""
        self._pipe.close()  # an idle process reads the end of the tasks and exits
        self.process.join(_GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def work(pipe: Connection, payload: bytes) -> None:
    """Run the main loop of a worker process.

    It first sends ``(None, None, failure)``, where the failure to load the function is None if it is ready. It answers
    each ``(key, argument)`` with ``(key, value, failure)``.
    """
    ignore_signals()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    limit_threads()
    try:
        function = pickle.loads(payload)  # from the parent process, so trusted
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
    except Exception as error:
        send(pipe, (None, None, describe_failure(error)))
        return
    with contextlib.suppress(EOFError, OSError):  # the parent has closed the pipe
        send(pipe, (None, None, None))
        while True:
            key, argument = receive(pipe)
            try:
                message = pack((key, function(key, argument), None))
            except Exception as error:
                message = pack((key, None, describe_failure(error)))
            send_packed(pipe, message)


def _leave_with_parent() -> None:
    """End this process when its parent ends in any way."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
