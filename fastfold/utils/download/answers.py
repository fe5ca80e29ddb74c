"""Whole answers of servers: requested again after a failure, within limits, and with all of their bytes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping
from email.message import Message
from typing import Any, TypeVar

from fastfold.errors import InputError, NetworkError
from fastfold.utils.download.http import BROKEN, TEMPORARY, open_url
from fastfold.utils.foreign_text import parse_json
from fastfold.utils.units import clock

T = TypeVar("T")
Say = Callable[[str], None]

_LONGEST_WAIT_S = 60.0
_ANSWER_S = 600.0
_PIECE = 1 << 20
_LENGTH = re.compile(r"[0-9]{1,15}")


def tell_nobody(*_: object) -> None:
    """Ignore a message."""


class Retries:
    """Attempts at a request, with pauses that double from a second to a minute.

    Args:
        attempts: Number of failures in a row before giving up.
        statuses: Statuses of answers after which a request is repeated, of :data:`.TEMPORARY`.
        pause: Function that waits a number of seconds.
        say: Called with a line about every failure.
    """

    def __init__(
        self,
        attempts: int = 6,
        *,
        statuses: Collection[int] = TEMPORARY,
        pause: Callable[[float], None] = time.sleep,
        say: Say = tell_nobody,
    ) -> None:
        self._attempts, self._statuses = attempts, statuses
        self._pause, self._say = pause, say
        self._failures = 0

    def reset(self) -> None:
        """Count failures from zero, because something arrived."""
        self._failures = 0

    def failed(self, error: NetworkError) -> None:
        """Wait before the next attempt, as long as the server asks if it does.

        Raises:
            NetworkError: No attempt is left, or the error is not a temporary one.
        """
        self._failures += 1
        if not error.temporary or (error.status is not None and error.status not in self._statuses):
            raise error
        if self._failures >= self._attempts:
            raise NetworkError(
                f"{error}; gave up after {self._failures} attempts",
                status=error.status,
                temporary=True,
                explanation=error.explanation,
            ) from None
        wait = 2.0 ** (self._failures - 1) if error.retry_after is None else error.retry_after
        wait = min(wait, _LONGEST_WAIT_S)
        self._say(f"{error}; trying again in {wait:.0f} s")
        self._pause(wait)

    def run(self, url: str, action: Callable[[], T]) -> T:
        """Return the result of an action, repeated after temporary failures; the address is for messages.

        Raises:
            NetworkError: See :meth:`failed`.
        """
        while True:
            try:
                result = action()
            except NetworkError as error:
                self.failed(error)
            except BROKEN as error:
                self.failed(broken(url, error))
            else:
                self.reset()
                return result


def broken(url: str, error: Exception) -> NetworkError:
    """Return the user's error for an exception of a connection."""
    text = f"{url}: the connection broke ({getattr(error, 'strerror', None) or error})"
    return NetworkError(text, temporary=True)


def read_answer(
    url: str,
    *,
    limit: int,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    seconds: float = _ANSWER_S,
    retries: Retries | None = None,
    now: Callable[[], float] = time.monotonic,
) -> bytes:
    """Return the whole body of an answer; after a failure the request is sent again.

    Args:
        url: Address.
        limit: Largest number of bytes.
        data: Body of a POST; None for a GET.
        headers: More headers of the request.
        secrets: Headers with credentials, which no redirect gets.
        timeout: Seconds that a connection may be silent.
        seconds: Seconds in which the body must have arrived.
        retries: Attempts; None for six.
        now: Clock that never goes back.

    Raises:
        NetworkError: See :func:`.open_url`; or the body is too large, too slow, or always ends too early.
    """

    def once() -> bytes:
        with open_url(url, data=data, headers=headers, secrets=secrets, timeout=timeout) as response:
            length = stated_length(url, response.headers)
            pieces, size, end = [], 0, now() + seconds
            # In pieces, because reading all at once could wait as long as a slow server sends.
            while piece := response.read1(_PIECE):
                if now() > end:
                    raise too_slow(url, seconds)
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise too_large(url, limit)
            if length is not None and size < length:
                raise OSError(f"closed after {size:,} of {length:,} bytes")
            return b"".join(pieces)

    return (retries or Retries()).run(url, once)


def stated_length(url: str, headers: Message) -> int | None:
    """Return the length that an answer states, in bytes, None if it states none, or raise NetworkError."""
    text = headers.get("Content-Length")
    if text is not None and _LENGTH.fullmatch(text) is None:
        raise NetworkError(
            f"{url}: expected a Content-Length in digits, found {text[:60]!r}; check the address"
        )
    return None if text is None else int(text)


def too_large(url: str, limit: int) -> NetworkError:
    """Return the error for an answer beyond a limit in bytes."""
    return NetworkError(f"{url}: the server sends more than {limit:,} bytes, more than any valid answer")


def too_slow(url: str, seconds: float) -> NetworkError:
    """Return the error for an answer that takes too long."""
    return NetworkError(
        f"{url}: the answer did not arrive within {clock(seconds)}; run the same command later"
    )


def json_answer(url: str, text: str | bytes, *, server: str) -> Any:
    """Parse the JSON of an answer, or raise NetworkError; ``server`` names the expected one."""
    try:
        return parse_json(text, url, remedy=f"is this the address of {server}?")
    except InputError as error:
        raise NetworkError(str(error)) from None
