"""Process settings of a command: PyTorch's environment variables, standard streams, and termination."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn


def prepare_environment() -> None:
    """Set environment variables that make PyTorch fast; call it before PyTorch and NumPy are imported.

    Waiting threads sleep soon. By default, GNU OpenMP spins for milliseconds at the end of every operation, and NumPy's
    OpenBLAS for tens of them, which is slow on a shared machine.

    Large tensors use huge pages (Linux): the first touch of memory costs a fault for 2 MiB instead of 4 KiB.

    On a GPU, PyTorch's memory grows by pages instead of segments of fixed sizes. With such segments, a long target
    would leave gaps that no tensor fits into.

    On an Apple GPU, operators that Metal lacks run on the CPU instead of failing.

    Variables that the user has set are kept. Measurements are in ``benchmarks/results/choices.md``.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "17")  # a power of two, in cycles
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def open_standard_streams() -> None:
    r"""Open the null device in place of closed standard streams, and let output spell letters that it lacks.

    Daemons start programs with closed streams. A file opened later would get a stream's number, and messages would be
    written into it. A letter outside the output's encoding, of a name or of Å, is written as ``\u03b1``.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # child processes need the stream too
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def exit_with(run: Callable[[], int]) -> NoReturn:
    """Call a function and end the process with the code that it returns, without freeing modules and tensors.

    Python frees them one by one, which takes long for those of PyTorch; the system frees them at once. Exit handlers
    run before. Under a tracer, which may report at the end, the process ends as usual.
    """
    codes: list[int] = []

    def leave() -> None:
        if codes and sys.gettrace() is None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(codes[0])

    atexit.register(leave)  # the first handler runs last
    codes.append(run())
    sys.exit(codes[0])


class Termination(KeyboardInterrupt):
    """A signal other than Ctrl-C that ends the program.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number  #: Exit code of the process


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Raise Termination when a batch system or a closed terminal ends the program, so that it ends as by Ctrl-C.

    An ignored signal stays ignored: ``nohup`` lets a command outlive its terminal.
    """
    before = {}
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(number: int, _frame: object) -> NoReturn:
    raise Termination(number)
