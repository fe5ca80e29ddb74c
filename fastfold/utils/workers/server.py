"""Server that imports modules once and forks worker processes, where the system has one."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_started = False
_main_lock = threading.Lock()


def start_server(modules: Sequence[str]) -> None:
    """Start the server, which imports modules while this process goes on.

    Only a program's main process calls this, before it imports PyTorch. It has no effect outside of Linux, where forks
    of a process with system libraries are not safe, or do not exist.

    Modules that do not exist are skipped; none may start threads when it is imported.
    """
    global _started
    if _started or sys.platform != "linux":
        return
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload(["fastfold.utils.workers.server_settings", *modules])
    # Without a server, with too many processes for example, workers are spawned when they are needed.
    with contextlib.suppress(OSError):
        forkserver.ensure_running()
        _started = True


def worker_context() -> Any:
    """Return the context of ``multiprocessing`` for worker processes: forked by the server, or spawned."""
    return multiprocessing.get_context("forkserver" if _started else "spawn")


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not import the main script, whose code may lack a main guard and would run again.

    Functions and data for these processes belong to other modules.
    """
    main = sys.modules["__main__"]
    with _main_lock:
        spec, file = main.__spec__, main.__dict__.pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file
