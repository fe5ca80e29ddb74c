"""What a command does with its process: settings that PyTorch reads, standard output, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


def prepare_environment() -> None:
    """Set what makes PyTorch fast on a CPU; to be called before it is imported.

    Threads sleep soon while they wait for each other. GNU OpenMP spins for milliseconds at the end of every operation
    otherwise, which costs a machine that is shared dearly: an Evoformer block of 64 residues on 2 cores takes 3.2 s
    when another program has one of them, and 0.3 s with waits of this length; on an idle machine 0.14 s, with the
    default 0.13 s.

    Large tensors lie in huge pages (Linux): the first touch of memory costs a fault for 2 MiB instead of 4 KiB, a
    tenth of the time of an Evoformer block of 256 residues.

    On a GPU the memory that PyTorch holds grows by pages instead of segments of fixed sizes, which a long target would
    leave with gaps that nothing fits into: in the simulation of 30,000 residues on eight GPUs of 80 GB memory ends with
    them.

    Where the user has decided, nothing is changed.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def open_standard_streams() -> None:
    """Open the null device in place of standard streams that are closed, as daemons start programs.

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
            os.set_inheritable(number, True)  # programs that are started need the stream too
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def silence_stdout() -> None:
    """After the reader of our output went away, so that Python does not complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Leave no temporary files behind when a batch system or a closed terminal ends the program, as Ctrl-C does.

    A signal that is ignored stays ignored: ``nohup`` lets a command outlive its terminal.
    """
    before = {}
    with contextlib.suppress(ValueError):  # not in the main thread, which alone hears of signals
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
