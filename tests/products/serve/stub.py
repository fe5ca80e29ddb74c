"""A server that folds nothing: it answers each job after a moment, from this process or from a worker's."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from fastfold.errors import InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.workers.job import Event, Finished, JobResult, Ready, Task, Worker
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.worker_process import LocalExecutor
from fastfold.products.serve.options import ServeOptions
from fastfold.products.serve.request import PROGRESS, RESULTS, JobAnswer, JobRequest, write_answer
from fastfold.products.serve.server import run_server, server_config
from fastfold.products.serve.service import Backend, Service
from fastfold.products.serve.worker import result_files

LONGEST = 500
"""Residues of the longest target that the stub admits."""


def fold(number: int, task: Task, *, seconds: float = 0.0) -> JobResult:
    """Answer the jobs of a group one after the other; the text of an answer is the sequence."""
    group: Sequence[Path] = task.job.payload
    for folder in group:
        time.sleep(seconds)
        target = JobRequest.read(folder).target()
        with (folder / PROGRESS).open("a") as log:
            log.write(f"{target.name}: recycle 0/0\n")
        results = folder / RESULTS
        results.mkdir(exist_ok=True)
        (results / "model.pdb").write_text(f"REMARK {target.chains[0].sequence}\n")
        (results / "report.html").write_text("<html></html>")
        (results / ".hidden").write_text("secret")
        text, files = target.chains[0].sequence, result_files(folder)
        write_answer(folder, JobAnswer("done", text, {"plddt": 90.0}, files))
    return JobResult("done")


class InlineExecutor:
    """One worker in the dispatcher's own thread."""

    def __init__(self, function: Any = fold) -> None:
        self._function = function
        self._tasks: list[Task] = []
        self._events: list[Event] = [Ready(Worker("w", "fold"))]

    def start(self, worker: str, task: Task) -> None:
        self._tasks.append(task)

    def wait(self, timeout: float) -> list[Event]:
        events, self._events = self._events, []
        for task in self._tasks:
            events.append(Finished("w", self._function(task.job.id, task)))
        self._tasks = []
        if not events:
            time.sleep(min(timeout, 0.01))
        return events

    def close(self) -> None:
        pass


def check(request: JobRequest, target: Any, folder: Path) -> None:
    """Refuse invalid settings, and long targets as the memory plan does."""
    request.config(InferConfig())
    if target.num_residues > LONGEST:
        raise InputError(f"{target.num_residues} residues would need more memory", record=target.record)


def listener(port: int = 0) -> socket.socket:
    """A socket on the loopback."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    found.listen()
    return found


def run_stub(data: str, port: int, group: int, seconds: float, in_processes: bool) -> int:
    """Serve until killed; for a process of its own."""
    function = partial(fold, seconds=seconds)
    executor: Any = partial(InlineExecutor, function)
    if in_processes:
        executor = partial(LocalExecutor, [(Worker("w", "fold"), function)], ScreenOptions())
    options = ServeOptions(Path(data), port=port, group=group, max_jobs=1000)
    run_server(options, Backend(check, executor), listener(port), lambda line: None)
    return 0


@contextlib.contextmanager
def serving(data: Path, function: Any = fold, **options: Any) -> Iterator[tuple[str, Service]]:
    """Yield the address and the state of a server in a thread of this process."""
    given = replace(ServeOptions(data), **options)
    service = Service(given, Backend(check, partial(InlineExecutor, function)))
    server = uvicorn.Server(server_config(service))
    with listener() as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        service.start()
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", service
        finally:
            server.should_exit = True
            thread.join()
            service.stop()
