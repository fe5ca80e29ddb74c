"""Processes that draw and relax finished predictions while the next target folds."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fastfold.errors import FastFoldError
from fastfold.inference.config import InferConfig
from fastfold.utils.machine import available_cores, host_available_bytes
from fastfold.utils.workers.process import FunctionProcess, ProcessEnded, describe_failure, pack_function
from fastfold.utils.workers.server import start_server, without_main, worker_context

if TYPE_CHECKING:
    import torch

PLOTS = ("matplotlib.figure", "matplotlib.backends.backend_agg", "fastfold.inference.output.plots")
"""Modules that plots need."""
VIEWER = ("fastfold.inference.report.server_viewer",)
"""Module that compresses the page's viewer."""
RELAXATION = ("fastfold.inference.relax.files",)  #: Modules that a relaxation needs
MAX_PROCESSES = 4  #: Largest number of processes that relax
PROCESS_BYTES = 512 << 20  #: Memory of a process: Python, OpenMM, and the structure that it relaxes
_ATTEMPTS = 2
_NICENESS = 10


class BackgroundWork(NamedTuple):
    """Call of a function in the other process."""

    function: Callable[..., Any]  #: Function of a module
    arguments: tuple[Any, ...]  #: Its picklable arguments
    options: dict[str, Any]  #: Its picklable arguments by name

    def run(self) -> Any:
        """Call the function here."""
        return self.function(*self.arguments, **self.options)


def count_processes(targets: int, cores: int, memory: int) -> int:
    """Return the number of processes that relax targets meanwhile, in an eighth of the host's free ``memory``."""
    return max(1, min(targets, cores, memory // (8 * PROCESS_BYTES), MAX_PROCESSES))


def start_ahead(config: InferConfig) -> None:
    """Import background modules, and compress the page's viewer, while this process imports PyTorch.

    A program that has imported it starts no server.
    """
    modules = _needed_modules(config)
    viewer = VIEWER if config.embed is None else ()
    if modules and "torch" not in sys.modules:
        start_server([*modules, *viewer, __name__])


@contextlib.contextmanager
def open_background(config: InferConfig, device: torch.device, targets: int) -> Iterator[Background | None]:
    """Yield processes for the plots and relaxation of a run; None if it needs neither."""
    modules = _needed_modules(config)
    if not modules:
        yield None
        return
    from fastfold.inference.report.molstar import pack_ahead  # slow to import, and start_ahead must be quick

    # A GPU relaxes one structure at a time.
    is_on_cpu = device.type == "cpu" or config.relax_platform == "CPU"
    processes = 1
    if config.relax != "none" and is_on_cpu:
        processes = count_processes(targets, available_cores(), host_available_bytes())
    background = Background(modules, processes)
    try:
        if config.embed is None:  # a page shows structures
            pack_ahead(lambda call: background.submit(BackgroundWork(call, (), {})))
        yield background
    finally:
        background.close()


def _needed_modules(config: InferConfig) -> tuple[str, ...]:
    """Return the modules that the background of a fold needs; empty if it needs no background."""
    plots = PLOTS if config.plots and config.embed is None else ()
    return (*plots, *(RELAXATION if config.relax != "none" else ()))


class Background:
    """Processes that call functions, with lower priority than folds, after they import ``modules``.

    A call whose process ends is repeated once in another one. If none can start, other calls run in threads of this
    one.
    """

    def __init__(self, modules: Sequence[str] = (), processes: int = 1) -> None:
        self.processes = processes
        self._modules = tuple(modules)
        self._own = threading.local()
        self._started: list[FunctionProcess] = []
        self._closed = False
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="background")
        for _ in range(processes):
            self._threads.submit(self._process)

    def submit(self, call: BackgroundWork) -> Future[Any]:
        """Return the future result of a call."""
        return self._threads.submit(self._call, call)

    def close(self) -> None:
        """End the processes at once, and drop calls that have not started."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._started):
            process.kill()
        self._threads.shutdown()
        for process in self._started:
            process.end()

    def _call(self, call: BackgroundWork) -> Any:
        ended = ""
        for _ in range(_ATTEMPTS):
            process = self._process()
            if process is None:
                if ended:  # the call could end this process too
                    break
                return call.run()
            try:
                return _result(process, call)
            except ProcessEnded as error:
                ended, self._own.process = str(error), None
                if self._closed:
                    break
        raise FastFoldError(f"the process that draws and relaxes ended: {ended}")

    def _process(self) -> FunctionProcess | None:
        """Return the process of this thread, started if needed; None if it cannot start."""
        process: FunctionProcess | None = getattr(self._own, "process", None)
        if process is None:
            with contextlib.suppress(Exception):  # for example too many processes
                process = self._start()
            self._own.process = process
        return process

    def _start(self) -> FunctionProcess:
        start = partial(FunctionProcess, worker_context(), pack_function(_answer), "fastfold-background")
        with without_main():
            try:
                process = start()
            except (EOFError, OSError):  # the server of workers was ending; the next start has another
                process = start()
        self._started.append(process)
        if self._closed:
            process.kill()
        process.answer()  # until it is ready
        with contextlib.suppress(Exception):  # the first call raises it again
            _result(process, BackgroundWork(_prepare, (self._modules,), {}))
        return process


def _result(process: FunctionProcess, call: BackgroundWork) -> Any:
    answer, failure = process.call(0, call)
    if failure is not None:
        raise FastFoldError(failure)
    result, error = answer
    if error is not None:
        raise error
    return result


def _answer(_: int, call: BackgroundWork) -> tuple[Any, Exception | None]:
    try:
        return call.run(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some exceptions cannot be rebuilt from their arguments
            return None, FastFoldError(describe_failure(error))
        return None, error


def lower_priority() -> None:
    """Let folds compute before this process."""
    with contextlib.suppress(AttributeError, OSError):  # Windows has no priorities of this kind
        os.nice(_NICENESS)


def _prepare(modules: Sequence[str]) -> None:
    lower_priority()
    for name in modules:
        importlib.import_module(name)
