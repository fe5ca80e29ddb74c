"""Lines that commands print: the first one, messages, and the result of a run."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fastfold._version import __version__
from fastfold.inference.progress import wrapped

if TYPE_CHECKING:
    from fastfold.inference.runner import Summary


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


def print_summary(summary: Summary, out: Path, *, done: str = "folded", table: str = "") -> int:
    """Print the result of a run, whose targets are ``done``, in one line; return the exit code.

    Of several processes that fold together, only the first one prints. A file ``table`` of the folder is named in a
    second line if there are predictions.
    """
    if not is_first_process():
        return 0
    from fastfold.inference.report.write import NAME as PAGE

    place = ""
    if summary.folded or summary.skipped:
        place = f"; open {out / PAGE}" if (out / PAGE).is_file() else f"; results in {out}"
    try:
        print(summary.counts(done) + place, flush=True)
        if table and summary.predictions:
            print(f"Table: {out / table}", flush=True)
    except OSError:  # closed pipe or full disk: the results are written anyway
        silence_stdout()
    return 1 if summary.failed else 0


def silence_stdout() -> None:
    """Discard further output after its reader has closed, so that Python does not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
