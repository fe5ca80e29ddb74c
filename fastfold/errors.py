"""Errors for the user.

Everything that a user can cause raises a subclass of :class:`FastFoldError`. The command line prints its
message alone, without a traceback; a message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import os


class FastFoldError(Exception):
    """Base of all errors whose message alone tells the user what to do."""


class InputError(FastFoldError):
    """Error in a FASTA, alignment, structure or feature file.

    Args:
        message: Problem and remedy.
        path: File with the problem.
        line: Line number in that file, counted from 1.
        record: Name of the record in that file.
        temporary: True if the same file may be readable later: a disk or a network failed, not its content.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        line: int | None = None,
        record: str | None = None,
        temporary: bool = False,
    ) -> None:
        self.path, self.line, self.record, self.temporary = path, line, record, temporary
        place = "" if path is None else os.fspath(path)
        if line is not None:
            place += f":{line}" if place else f"line {line}"
        if record is not None:
            shown = record if len(record) <= 60 else record[:57] + "..."
            place += f" (record {shown!r})" if place else f"record {shown!r}"
        super().__init__(f"{place}: {message}" if place else message)


class WeightsError(FastFoldError):
    """Error in a weights file that is missing, damaged, unsafe, or made for another network."""


class ConfigError(FastFoldError):
    """Error in a configuration that cannot be built or run."""


class LostProcessError(FastFoldError):
    """Error after another process of a run ended, or did not answer in time."""


class OutputError(FastFoldError):
    """Error for a result that cannot be written to its place."""


class NetworkError(FastFoldError):
    """Error for a server that cannot be reached, or whose answer cannot be used.

    Args:
        message: Problem and remedy.
        status: Status of the HTTP answer, if there was one.
        temporary: True if the same request may succeed later.
        retry_after: Seconds after which the server wants the next request, if it said so.
        explanation: Reason in the server's words, if it gave one.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        temporary: bool = False,
        retry_after: float | None = None,
        explanation: str = "",
    ) -> None:
        self.status, self.temporary, self.retry_after = status, temporary, retry_after
        self.explanation = explanation
        super().__init__(message)


class WriteError(OutputError):
    """Error for a file that cannot be written: the disk is full or read-only, or access is denied.

    Later files would fail too.
    """


class PlaceError(WriteError):
    """Error for a file that cannot be written because of a file or folder at its path; other files can be."""


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's message, or its type: at most 200 letters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
