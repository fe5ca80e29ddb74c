"""Errors for the user.

Everything that a user can cause raises a subclass of :class:`FastFoldError`. The command line prints its
message alone, without a traceback; a message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

Spelling = Callable[[str, str | None], str]
"""Function from the name of a setting, and its value if there is one, to how a reader writes them."""


def as_argument(name: str, value: str | None) -> str:
    """Return a setting as an argument in Python: ``num_recycles=3``, ``precision='bf16'``, ``Sampling.fraction``."""
    if value is None and "." in name:
        return name
    if value is None or value.isupper() or re.fullmatch(r"-?[\d.]+|True|False|None", value):
        return f"{name}={value or ''}"
    return f"{name}={value!r}"


def as_option(name: str, value: str | None) -> str:
    """Return a setting as an option of the command line: ``--num-recycles 3``, ``--overwrite`` for True.

    Of a field with its class, such as ``Sampling.fraction``, the name that its declaration registered is shown.
    """
    shown = OPTION_NAMES.get(name) or f"--{name.rpartition('.')[2].replace('_', '-')}"
    return shown + ("" if value in (None, "True") else f" {value}")


OPTION_NAMES: dict[str, str] = {}  #: Options of fields that are called otherwise, by class and field


_SETTING = re.compile(r"`((?:[A-Z]\w*\.)?[A-Za-z]\w*)(?:=([^`]*))?`")
_spelling: Spelling = as_argument


def spelled(text: str) -> str:
    """Return a message with its settings, such as ```precision=bf16```, as the reader writes them.

    In Python they are arguments; see :func:`settings_spelled`.
    """
    return _SETTING.sub(lambda name: _spelling(name[1], name[2]), text)


@contextmanager
def settings_spelled(spelling: Spelling) -> Iterator[None]:
    """Spell the settings in all messages of this process in another way for a while."""
    global _spelling
    before, _spelling = _spelling, spelling
    try:
        yield
    finally:
        _spelling = before


class FastFoldError(Exception):
    """Base of all errors whose message alone tells the user what to do.

    A setting stands in a message in backquotes, by its name with or without a value, and is shown by :func:`spelled`.
    With its class, as in ```Sampling.fraction```, it is a field whose option has another name.

    Example:
        >>> import fastfold
        >>> try:
        ...     fastfold.predict("MTYKLIL1", "mini")
        ... except fastfold.FastFoldError as error:
        ...     print(error)
        record 'query': digit '1' at position 8 of the sequence; remove the position numbers
    """

    def __str__(self) -> str:
        """Return the message for the reader of this process."""
        return spelled(super().__str__())


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


class TargetError(InputError):
    """Error that leaves out a target, with the target's name before its message.

    Args:
        target: Name of the target, which is the ``record``.
        problem: Problem and remedy, or an error in a file that the target needs, whose record may be another.
    """

    def __init__(self, target: str, problem: str | InputError) -> None:
        super().__init__(f"{target}: {problem}")
        self.record = target
        if isinstance(problem, InputError):
            self.path, self.line, self.temporary = problem.path, problem.line, problem.temporary


class WeightsError(FastFoldError):
    """Error in a weights file that is missing, damaged, unsafe, or made for another network."""


class ConfigError(FastFoldError):
    """Error in a configuration that cannot be built or run."""


class LostProcessError(FastFoldError):
    """Error after another process of a run ended, or did not answer in time."""


class OutputError(FastFoldError):
    """Error for a result that cannot be written to its place."""


def printable(text: str) -> str:
    """Return a text with a blank in place of each character that could control a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class NetworkError(FastFoldError):
    """Error for a server that cannot be reached, or whose answer cannot be used.

    The message may have the server's words, so characters that control a terminal are blanks in it.

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
        self.explanation = printable(explanation)
        super().__init__(printable(message))


class WriteError(OutputError):
    """Error for a file that cannot be written: the disk is full or read-only, or access is denied.

    Later files would fail too.
    """


class PlaceError(WriteError):
    """Error for a file that cannot be written because of a file or folder at its path; other files can be."""


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's message, or its type: at most 200 letters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def is_raised_in(error: BaseException, package: str) -> bool:
    """Return True if a function of a package raised an error or was on the way to it."""
    return any(
        str(frame.f_globals.get("__name__")).startswith(package) for frame, _ in walk_tb(error.__traceback__)
    )


def suggest(
    name: str,
    known: Iterable[str],
    *,
    meant: str | None = None,
    otherwise: str = "check the spelling",
    cutoff: float = 0.6,
) -> str:
    """Return a question for the known name nearest to a wrong one, for the end of an error message.

    Args:
        name: The wrong name.
        known: Names that are valid in its place.
        meant: The right name, if a table has it; None for the nearest of ``known``.
        otherwise: Text if no name is near.
        cutoff: Smallest similarity of a near name, 0 to 1 (:meth:`difflib.SequenceMatcher.ratio`).

    Example:
        >>> suggest("num_recycels", ["num_recycles", "seeds"])
        'did you mean num_recycles?'
        >>> suggest("x", ["num_recycles", "seeds"])
        'check the spelling'
    """
    near = [meant] if meant else difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise
