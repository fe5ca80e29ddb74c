"""State of a running server, and its operations on jobs."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fastfold._version import __version__
from fastfold.data.targets import Target
from fastfold.inference.report.write import NAME as REPORT
from fastfold.inference.workers.job import Executor
from fastfold.products.serve.dispatcher import Dispatcher
from fastfold.products.serve.metrics import Metrics
from fastfold.products.serve.options import ServeOptions
from fastfold.products.serve.queue import JobQueue, QueuedJob, QueueUnavailableError
from fastfold.products.serve.request import PROGRESS, RESULTS, JobRequest
from fastfold.products.serve.submission import JobView, ServerView, Submission
from fastfold.products.serve.tokens import Links, Tokens, read_tokens
from fastfold.utils.atomic_files import output_error, prepare_output_directory, sync_folder
from fastfold.utils.hashing import input_hash

Check = Callable[[JobRequest, Target, Path], None]
"""Function that refuses a job that cannot be folded, as :meth:`~fastfold.products.serve.admission.Admission.check`."""
ID = re.compile(r"[0-9a-f]{32}")  #: Form of the names of jobs, which are those of their folders
_DAY_S = 24 * 3600.0
_SWEEP_S = 3600.0
_LONGEST_LINE = 4096


@dataclass(frozen=True)
class Backend:
    """Folding part of a server: refuses jobs, starts the workers, and limits the bytes of each fold if it is known."""

    check: Check
    executor: Callable[[], Executor]
    memory: int | None = None


class Service:
    """Queue, users, workers and metrics of a server.

    Errors are those of :func:`.read_tokens` and of :class:`.JobQueue`.
    """

    def __init__(
        self, options: ServeOptions, backend: Backend, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.options, self._check = options, backend.check
        self.tokens: Tokens | None = None if options.tokens is None else read_tokens(options.tokens)
        self.links = Links()
        self.stopping = threading.Event()  #: Set when the server is about to end
        self._sweeper = threading.Thread(target=self._sweep, name="fastfold-sweeper", daemon=True)
        prepare_output_directory(options.data).chmod(0o700)  # it has the sequences of all users
        self._jobs = prepare_output_directory(options.data / "jobs")
        self.queue = JobQueue(options.data / "queue.sqlite")
        self.metrics = Metrics(self.queue, lambda: self.dispatcher.num_workers)
        self.dispatcher = Dispatcher(
            self.queue,
            self._jobs.resolve(),
            backend.executor,
            self.metrics,
            group=options.group,
            memory=backend.memory,
            say=say,
        )

    def start(self) -> None:
        """Remove folders of submissions that were not admitted, recover jobs, and start the workers."""
        for folder in self._jobs.iterdir():
            if ID.fullmatch(folder.name) and self.queue.get(folder.name) is None:
                shutil.rmtree(folder, ignore_errors=True)
        self.remove_old()
        self.dispatcher.start()
        self._sweeper.start()

    def stop(self) -> None:
        """End the workers and close the queue."""
        self.stopping.set()
        self._sweeper.join()
        self.dispatcher.stop()
        self.queue.close()

    def submit(self, submission: Submission, user: str, key: str | None) -> QueuedJob:
        """Admit a job, or raise FastFoldError; a key, if there is one, recognises repetitions of a submission."""
        body = input_hash(submission.model_dump_json())
        if key is not None and (known := self.queue.known(user, key, body)) is not None:
            return known
        request = submission.request()
        target = request.target()
        job = secrets.token_hex(16)
        folder = self._jobs / job
        with contextlib.ExitStack() as discarded:
            discarded.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                folder.mkdir()
                request.write(folder)
                sync_folder(self._jobs)  # the folder outlives a power cut, as its row of the queue does
            except OSError as error:
                raise output_error(folder, "write", error) from error
            self._check(request, target, folder)
            admitted = self.queue.admit(
                job,
                user=user,
                name=target.name,
                residues=target.num_residues,
                fingerprint=request.fingerprint(),
                priority=submission.priority,
                key=key,
                body=body,
                max_jobs=self.options.max_jobs,
                max_queue=self.options.max_queue,
            )
            if admitted.id == job:  # otherwise another request with the key was faster
                discarded.pop_all()
        return admitted

    def view(self, job: QueuedJob) -> JobView:
        """Return a job as its user sees it."""
        result = job.result_fields
        files = result.get("files", [])
        return JobView.model_validate(
            vars(job)
            | {
                "position": self.queue.position(job) if job.state == "queued" else None,
                "scores": result.get("scores", {}),
                "files": files,
                "progress": self._last_line(job) if job.state == "running" else None,
                "page": self.address(job, REPORT) if REPORT in files else None,
            }
        )

    def state(self, user: str) -> ServerView:
        """Return the state of the server as a user sees it."""
        counts = self.queue.counts()
        return ServerView(
            version=__version__,
            user=user,
            queued=counts.get("queued", 0),
            running=counts.get("running", 0),
            workers=self.dispatcher.num_workers,
            problem=self.dispatcher.problem,
            max_residues=self.options.max_residues,
        )

    def address(self, job: QueuedJob, name: str) -> str:
        """Return the signed address of a file of a job, relative to the server's."""
        return f"/v1/results/{self.links.sign(job.id)}/{quote(name, safe='')}"

    def remove(self, job: QueuedJob) -> bool:
        """Cancel a waiting job, or remove an answered one with its files; return False if it is running."""
        if self.queue.cancel(job.id):
            return True
        if not self.queue.remove(job.id):
            return False
        shutil.rmtree(self._jobs / job.id, ignore_errors=True)
        return True

    def remove_old(self) -> None:
        """Remove jobs that were finished longer ago than the server keeps them."""
        if self.options.keep_days is not None:
            for job in self.queue.finished_before(time.time() - self.options.keep_days * _DAY_S):
                self.remove(job)

    def _sweep(self) -> None:
        """Remove old jobs every hour until the server ends."""
        while not self.stopping.wait(_SWEEP_S):
            with contextlib.suppress(QueueUnavailableError):  # the next hour tries again
                self.remove_old()

    def progress(self, job: QueuedJob, offset: int) -> tuple[list[tuple[int, str]], int]:
        """Return complete lines of a job's progress, each with the offset of its end, and the last offset.

        ``offset`` counts the bytes that were read before.
        """
        data = b""
        with contextlib.suppress(OSError), (self._jobs / job.id / PROGRESS).open("rb") as file:
            file.seek(offset)
            data = file.read(1 << 20)
        lines = []
        for line in data.split(b"\n")[:-1]:
            offset += len(line) + 1
            lines.append((offset, line.decode("utf-8", "replace").rstrip("\r")))
        return lines, offset

    def _last_line(self, job: QueuedJob) -> str | None:
        """Return the last complete line of a job's progress; None before the first one."""
        with contextlib.suppress(OSError), (self._jobs / job.id / PROGRESS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
            lines = file.read().rpartition(b"\n")[0].splitlines()
            return self.hide_paths(lines[-1].decode("utf-8", "replace")) if lines else None
        return None

    def file(self, job: QueuedJob, name: str) -> Path:
        """Return the path of a file; the caller has found the name in the job's list of files."""
        return self._jobs / job.id / RESULTS / name

    def hide_paths(self, text: str) -> str:
        """Remove the folders of jobs from a message for a user."""
        folders = "|".join(re.escape(str(folder)) for folder in {self._jobs, self._jobs.resolve()})
        return re.sub(f"(?:{folders})/(?:[0-9a-f]{{32}}/)?", "", text)
