"""Functions and ``fastfold`` commands in processes of their own, forked from the server of :mod:`spawn_ranks`.

Importing PyTorch takes several seconds of each new interpreter. What such a process does with signals, files, pipes and
other processes does not depend on it; that commands work in a new interpreter too is tested by a few of each kind.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch

from fastfold.cli import main
from tests.helpers.spawn_ranks import CONTEXT

_DEFAULT_SECONDS = 240.0


def _child(
    function: Callable[..., int | None],
    arguments: Sequence[Any],
    environment: Mapping[str, str],
    streams: Sequence[Connection],
) -> None:
    gc.freeze()  # as in a rank
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    # As in an interpreter that was started in the foreground.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it
    torch.set_num_threads(1)
    sys.exit(function(*arguments))


class Forked:
    """A process, with the interface of :class:`subprocess.Popen` with ``text=True``.

    Args:
        function: At the top level of a module; what it returns is the exit code.
        arguments: For the function; pickled.
        env: Added to the environment.
        stdout: A stream to write to; a pipe to read from unless told otherwise.
        stderr: As ``stdout``, or ``subprocess.STDOUT``.
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        stdout: IO[str] | None = None,
        stderr: IO[str] | int | None = None,
    ) -> None:
        self.stdout, first = _stream(stdout)
        if stderr == subprocess.STDOUT:
            self.stderr, second = None, first
        else:
            assert not isinstance(stderr, int)
            self.stderr, second = _stream(stderr)
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | dict(env or {})
        with Connection(first) as out, Connection(os.dup(second)) as err:
            self._process: Any = CONTEXT.Process(
                target=_child, args=(function, arguments, environment, (out, err))
            )
            self._process.start()
        if second != first:
            os.close(second)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, the negative signal if one killed it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, or None."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it without warning."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = _DEFAULT_SECONDS) -> int:
        """Wait for its end; returns the exit code."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked", timeout)
        return self.returncode

    def communicate(self, timeout: float = _DEFAULT_SECONDS) -> tuple[str, str]:
        """Read to the end of both pipes and wait; an empty text for a stream that is no pipe."""
        end, texts = time.monotonic() + timeout, ["", ""]

        def read(which: int, stream: IO[str]) -> None:
            with stream:
                texts[which] = stream.read()

        readers = [
            threading.Thread(target=read, args=(which, stream), daemon=True)
            for which, stream in enumerate((self.stdout, self.stderr))
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("forked", timeout)
        self.wait(max(1.0, end - time.monotonic()))
        return texts[0], texts[1]


def _stream(given: IO[str] | None) -> tuple[IO[str] | None, int]:
    """The side to read from, if it is ours, and a descriptor to write to."""
    if given is not None:
        return None, os.dup(given.fileno())
    reader, writer = os.pipe()
    return open(reader), writer


def _command(arguments: Sequence[str]) -> int:
    sys.argv = ["fastfold", *arguments]
    return main(list(arguments))


def fork_command(*arguments: str | Path, **options: Any) -> Forked:
    """A ``fastfold`` command; options are those of :class:`Forked`."""
    return Forked(_command, [str(argument) for argument in arguments], **options)


def rank_environments(size: int) -> Iterator[dict[str, str]]:
    """What torchrun tells each of the processes that it starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(size):
        yield {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
