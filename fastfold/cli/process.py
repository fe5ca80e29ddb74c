"""Process settings of a command: PyTorch's environment variables, standard streams, and termination."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fastfold._version import __version__
from fastfold.inference.progress import wrapped

if TYPE_CHECKING:
    from fastfold.inference.runner import Summary


def prepare_environment() -> None:
    """Set environment variables that make PyTorch fast; call it before PyTorch is imported.

    Waiting threads sleep soon. By default, GNU OpenMP spins for milliseconds at the end of every operation, which is
    slow on a shared machine.

    Large tensors use huge pages (Linux): the first touch of memory costs a fault for 2 MiB instead of 4 KiB.

    On a GPU, PyTorch's memory grows by pages instead of segments of fixed sizes. With such segments, a long target
    would leave gaps that no tensor fits into.

    Variables that the user has set are kept. Measurements are in ``benchmarks/results/choices.md``.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def open_standard_streams() -> None:
    """Open the null device in place of closed standard streams, as daemons start programs.

    A file opened later would otherwise get a stream's number, and messages would be written into it.
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


def is_first_process() -> bool:
    """Return True in the process that prints, of several that torchrun started or of one."""
    return int(os.environ.get("RANK", "0")) == 0


def announce(options: argparse.Namespace) -> None:
    """Print the first line of a command before PyTorch is loaded, unless it is quiet or another process prints."""
    if options.quiet or not is_first_process():
        return
    line = f"fastfold {__version__}, results go to {options.out}"
    with contextlib.suppress(OSError):
        print(wrapped(line, sys.stderr), file=sys.stderr, flush=True)


def print_line(line: str, *, quiet: bool = False) -> None:
    """Print a line for the user on the standard error at once, unless it is quiet."""
    if not quiet:
        print(line, file=sys.stderr, flush=True)


def print_summary(summary: Summary, out: Path, *, done: str = "folded", table: str = "") -> int:
    """Print the result of a run in one line, where targets are ``done``; return the exit code.

    Of several processes that fold together, only the first one prints. A file ``table`` of the folder is named in a
    second line if there are predictions.
    """
    if not is_first_process():
        return 0
    from fastfold.inference.report.write import NAME as PAGE

    where = ""
    if summary.folded or summary.skipped:
        where = f"; open {out / PAGE}" if (out / PAGE).is_file() else f"; results in {out}"
    try:
        print(summary.counts(done) + where, flush=True)
        if table and summary.predictions:
            print(f"Table: {out / table}", flush=True)
    except OSError:  # closed pipe or full disk: the results are written anyway
        silence_stdout()
    return 1 if summary.failed else 0


@contextlib.contextmanager
def imports_without_collection() -> Iterator[None]:
    """Import modules inside without garbage collection, and leave their objects out of later ones.

    Modules live until the end, so that searches for garbage among them are in vain.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


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


def silence_stdout() -> None:
    """Discard further output after its reader has closed, so that Python does not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
