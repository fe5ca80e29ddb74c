"""Queue of jobs in an SQLite file, which survives the end of its process at any moment."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from fastfold.errors import FastFoldError, InputError
from fastfold.utils.foreign_text import json_object_or_none

State = Literal["queued", "running", "done", "failed", "cancelled"]
FINAL: tuple[State, ...] = ("done", "failed", "cancelled")  #: States after which a job does not change
SIMILAR = 1.25  #: Largest ratio of the lengths of the first job of a group and of another one
_VERSION = 2
_BUSY_S = 3.0  # until another process has to release the file
_FULL = "database or disk is full"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    user TEXT NOT NULL, key TEXT, name TEXT NOT NULL,
    priority INTEGER NOT NULL, residues INTEGER NOT NULL, fingerprint TEXT NOT NULL,
    state TEXT NOT NULL, text TEXT NOT NULL DEFAULT '', result TEXT NOT NULL DEFAULT '{}',
    submitted REAL NOT NULL, started REAL, finished REAL,
    answer INTEGER UNIQUE, losses INTEGER NOT NULL DEFAULT 0, body TEXT NOT NULL DEFAULT '',
    UNIQUE (user, key)
);
CREATE INDEX IF NOT EXISTS waiting ON jobs (state, priority DESC, number);
CREATE INDEX IF NOT EXISTS owned ON jobs (user, state);
"""


@dataclass(frozen=True)
class QueuedJob:
    """Job of the queue, with a random ``id``, name and length of its target, and a hash of its settings.

    ``number`` counts admissions and ``answer`` answers, both from 1. Times are seconds since 1970, None before. Jobs of
    higher priority start first. ``text`` is the result or the reason in words, ``result`` is JSON. ``losses`` counts
    workers that ended while they folded it. ``body`` is a hash of its submission, empty for jobs of older versions.
    """

    number: int
    id: str
    user: str
    name: str
    priority: int
    residues: int
    fingerprint: str
    state: State
    text: str
    result: str
    submitted: float
    started: float | None
    finished: float | None
    answer: int | None
    losses: int
    body: str

    @property
    def result_fields(self) -> dict[str, Any]:
        """Fields of the result; none before the answer."""
        return json_object_or_none(self.result) or {}


Execute = Callable[..., sqlite3.Cursor]
_COLUMNS = ", ".join(field.name for field in fields(QueuedJob))
_KNOWN = "WHERE user = ? AND key = ?"


class QueueFullError(InputError):
    """Error for a job beyond the limits of its user or of the queue."""


class RepeatedKeyError(InputError):
    """Error for another submission with the key of an earlier one."""


class QueueUnavailableError(FastFoldError):
    """Error for a queue whose file cannot be read or written at present; the same call may succeed later.

    Args:
        error: Error of SQLite.
    """

    def __init__(self, error: sqlite3.Error) -> None:
        self.is_full = _FULL in str(error)  #: True if the disk is full
        super().__init__(f"the queue of jobs cannot be used at present ({error}); try again later")


class JobQueue:
    """Queue of jobs in an SQLite file, created if missing, for several threads of one process.

    Each thread reads by a connection of its own, which waits for no writer. Methods raise
    :class:`QueueUnavailableError` if the file is locked by another process, the disk is full, or it cannot be read.

    Raises:
        InputError: The file is not a queue of this version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._readers = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._connection = self._connect()
        try:
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 1:
                self._connection.execute("ALTER TABLE jobs ADD COLUMN body TEXT NOT NULL DEFAULT ''")
            elif version not in (0, _VERSION):
                raise InputError(f"is a queue of version {version}; give another folder", path=path)
            # A commit waits for the disk, so an admitted job is not lost by a power cut either.
            for pragma in ("journal_mode=WAL", "synchronous=FULL"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._connection.executescript(_SCHEMA + f"PRAGMA user_version={_VERSION};")
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise InputError(f"cannot be used as a queue: {error}; give another folder", path=path) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            for connection in self._connections:
                connection.close()

    def admit(
        self,
        job: str,
        *,
        user: str,
        name: str,
        residues: int,
        fingerprint: str,
        priority: int = 0,
        key: str | None = None,
        body: str = "",
        max_jobs: int = 1 << 40,
        max_queue: int = 1 << 40,
    ) -> QueuedJob:
        """Add a job, or return the one that the user submitted with the same key before.

        The name and the residues are those of its target, the fingerprint is a hash of its settings, and ``body`` one
        of the whole submission. Limits are numbers of unfinished jobs, of the user and of all.

        Raises:
            QueueFullError: A limit is reached.
            RepeatedKeyError: The user submitted something else with the key.
        """
        with self._transaction() as execute:
            if key is not None and (known := _jobs(execute, _KNOWN, (user, key))):
                return _same_body(known[0], body)
            unfinished = "SELECT COUNT(*) FROM jobs WHERE state IN ('queued', 'running')"
            if execute(f"{unfinished} AND user = ?", (user,)).fetchone()[0] >= max_jobs:
                raise QueueFullError(
                    f"{user} has {max_jobs:,} unfinished jobs, the limit of a user; wait until some are finished"
                )
            if execute(unfinished).fetchone()[0] >= max_queue:
                raise QueueFullError(
                    f"the queue has {max_queue:,} unfinished jobs, its limit; try again later"
                )
            execute(
                "INSERT INTO jobs (id, user, key, name, priority, residues, fingerprint, body, state, submitted) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?)",
                (job, user, key, name, priority, residues, fingerprint, body, time.time()),
            )
            (admitted,) = _jobs(execute, "WHERE id = ?", (job,))
            return admitted

    def known(self, user: str, key: str, body: str = "") -> QueuedJob | None:
        """Return the job that a user submitted with a key, None if there is none; or raise RepeatedKeyError."""
        jobs = self._select(_KNOWN, (user, key))
        return _same_body(jobs[0], body) if jobs else None

    def get(self, job: str, user: str | None = None) -> QueuedJob | None:
        """Return a job, only if it is the user's if one is given; None if there is none."""
        return next(iter(self._select("WHERE id = ? AND (? IS NULL OR user = ?)", (job, user, user))), None)

    def jobs(self, user: str | None = None, *, state: str | None = None, limit: int = 100) -> list[QueuedJob]:
        """Return jobs in the order of admission, the last ones if there are more than ``limit``."""
        newest = self._select(
            "WHERE (? IS NULL OR user = ?) AND (? IS NULL OR state = ?) ORDER BY number DESC LIMIT ?",
            (user, user, state, state, limit),
        )
        return newest[::-1]

    def position(self, job: QueuedJob) -> int:
        """Return the number of waiting jobs that precede a waiting job."""
        query = "SELECT COUNT(*) FROM jobs WHERE state = 'queued' AND (priority > ? OR (priority = ? AND number < ?))"
        ((number,),) = self._rows(query, (job.priority, job.priority, job.number))
        return int(number)

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state that occurs."""
        return dict(self._rows("SELECT state, COUNT(*) FROM jobs GROUP BY state"))

    def start_group(self, size: int) -> list[QueuedJob]:
        """Start the first waiting job, with later ones of similar length, at most ``size``; return them as admitted.

        The first waiting job of the highest priority is always part of the group. Jobs of the same priority and
        settings join it. A job whose worker was lost before is started alone.
        """
        with self._transaction() as execute:
            first = _jobs(execute, "WHERE state = 'queued' ORDER BY priority DESC, number LIMIT 1")
            if not first:
                return []
            group, (one,) = first, first
            if size > 1 and not one.losses:
                group = _jobs(
                    execute,
                    "WHERE state = 'queued' AND priority = ? AND fingerprint = ? AND losses = 0 "
                    "AND residues BETWEEN ? AND ? ORDER BY number LIMIT ?",
                    (one.priority, one.fingerprint, one.residues / SIMILAR, one.residues * SIMILAR, size),
                )
            now = time.time()
            for job in group:
                execute("UPDATE jobs SET state = 'running', started = ? WHERE id = ?", (now, job.id))
        return [replace(job, state="running", started=now) for job in group]

    def finish(self, job: str, state: State, text: str, result: str = "{}") -> bool:
        """Answer a running job in words and in JSON; return False if it was answered before."""
        return self._close(job, "running", state, text, result)

    def cancel(self, job: str) -> bool:
        """Cancel a waiting job; return False if it has started."""
        return self._close(job, "queued", "cancelled", "cancelled by its user", "{}")

    def requeue(self, jobs: Sequence[str], *, lost: bool = False) -> None:
        """Return running jobs to their places in the queue; ``lost`` counts the loss of their worker."""
        with self._transaction() as execute:
            for job in jobs:
                execute(
                    "UPDATE jobs SET state = 'queued', losses = losses + ? WHERE id = ? AND state = 'running'",
                    (int(lost), job),
                )

    def remove(self, job: str) -> bool:
        """Remove an answered job; return False if it is not answered."""
        with self._transaction() as execute:
            query = "DELETE FROM jobs WHERE id = ? AND state IN ('done', 'failed', 'cancelled')"
            return execute(query, (job,)).rowcount == 1

    def finished_before(self, moment: float) -> list[QueuedJob]:
        """Return the jobs that were answered before a time, in seconds since 1970."""
        return self._select("WHERE finished < ? ORDER BY number", (moment,))

    def _close(self, job: str, before: State, state: State, text: str, result: str) -> bool:
        with self._transaction() as execute:
            changed = execute(
                "UPDATE jobs SET state = ?, text = ?, result = ?, finished = ?, "
                "answer = (SELECT COALESCE(MAX(answer), 0) + 1 FROM jobs) WHERE id = ? AND state = ?",
                (state, text, result, time.time(), job, before),
            )
            return changed.rowcount == 1

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, check_same_thread=False, isolation_level=None, timeout=_BUSY_S
        )
        self._connections.append(connection)
        return connection

    def _select(self, condition: str, values: Sequence[object] = ()) -> list[QueuedJob]:
        return [QueuedJob(*row) for row in self._rows(f"SELECT {_COLUMNS} FROM jobs {condition}", values)]

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            if not hasattr(self._readers, "connection"):
                self._readers.connection = self._connect()
            return self._readers.connection.execute(query, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise QueueUnavailableError(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[Execute]:
        """Yield the function that executes statements; they are undone if an error is raised inside."""
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection.execute
        except sqlite3.Error as error:
            raise QueueUnavailableError(error) from error


def _same_body(job: QueuedJob, body: str) -> QueuedJob:
    """Return a job if its submission had a body of the same hash, as far as both are known."""
    if job.body and body and job.body != body:
        raise RepeatedKeyError(
            f"the Idempotency-Key belongs to the job {job.id}, whose submission differs; use a new key"
        )
    return job


def _jobs(execute: Execute, condition: str, values: Sequence[object] = ()) -> list[QueuedJob]:
    """Return jobs as a transaction sees them."""
    return [QueuedJob(*row) for row in execute(f"SELECT {_COLUMNS} FROM jobs {condition}", tuple(values))]
