"""Files on a web server that are read like local ones, through broken connections."""

from __future__ import annotations

import base64
import http.client
import io
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from fastfold.errors import NetworkError
from fastfold.utils.download.http import BROKEN, open_url

MAX_READ = 1 << 24  #: Maximum number of bytes of a read, so that no number in a foreign file reserves memory

_BLOCK = 1 << 16

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes downloaded so far and the total bytes."""

_SKIP = 1 << 16  # bytes up to which reading and discarding is cheaper than another request
_MAX_DELAY = 60.0


class Readable(Protocol):
    """Readable file on the disk or on a server."""

    def read(self, size: int, /) -> bytes:
        """Read ``size`` bytes, or fewer at the end."""

    def seek(self, offset: int, /) -> int:
        """Set the position."""


def append_bytes(
    source: Readable, path: Path, *, name: str, offset: int, size: int, say: Say, progress: Progress
) -> None:
    """Copy a part of a source to a file that has its beginning already; ``offset`` and ``size`` are bytes.

    Raises:
        EOFError: The source ends before the part does.
        OSError: The file cannot be written.
        NetworkError: The server cannot be reached, or the file changed there.
    """
    with path.open("ab") as file:
        done = file.tell()
        if done:
            say(f"{name}: resuming after {done:,} of {size:,} bytes")
        source.seek(offset + done)
        progress(name, done, size)
        while done < size:
            block = source.read(min(_BLOCK, size - done))
            if not block:
                raise EOFError
            file.write(block)
            done += len(block)
            progress(name, done, size)
        file.flush()
        os.fsync(file.fileno())


class RemoteFile(io.RawIOBase):
    """File on a web server, read from any position.

    Each request asks for all bytes from a position on (``Range``, RFC 9110), so that a broken connection is reopened at
    its last position, and unused bytes are not sent. A server that ignores ranges sends the file from its beginning;
    bytes before the position are then discarded.

    Args:
        url: Address of the file.
        timeout: Seconds that a connection may be silent.
        attempts: Number of consecutive failures without data before giving up.
        secrets: Headers with credentials, which no redirect gets.
        pause: Function that waits a number of seconds.
        say: Function that gets a line about every broken connection.

    Attributes:
        ranges: True if the server sends parts.
        size: Size of the file in bytes; None if the server does not report it.
        version: Size and entity tag of the file, which change with it.
        md5: The file's MD5 sum where the server sends it (Google's ``x-goog-hash``), else None.

    Raises:
        NetworkError: The server cannot be reached, does not have the file, or sends an invalid answer.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        attempts: int = 6,
        secrets: Mapping[str, str] | None = None,
        pause: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__()
        self.url = url
        self.ranges = False
        self.size: int | None = None
        self.version: tuple[int | None, str] | None = None
        self.md5: bytes | None = None
        self._timeout, self._attempts, self._pause, self._say = timeout, attempts, pause, say
        self._secrets = secrets
        self._position = 0
        self._response: http.client.HTTPResponse | None = None
        self._at = 0  # next byte of the response
        self._end: int | None = None  # end of the response
        self._failures = 0
        self._retry(self._connect)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True; seeking is slow if the server ignores ranges."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; the next read sends a request.

        Raises:
            ValueError: The position is before the beginning, or counted from the end.
        """
        position = offset + (self._position if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END or position < 0:
            raise ValueError("expected a position from the beginning of the file, not negative")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Read ``size`` bytes; fewer only at the end of the file.

        Raises:
            NetworkError: The connection broke too often, or the file changed meanwhile.
            ValueError: ``size`` is above :data:`MAX_READ`, or asks for the whole file.
        """
        if size is None or not 0 <= size <= MAX_READ:
            raise ValueError(f"a read of {size} bytes is not allowed")
        pieces = []
        while size > 0 and (piece := self._retry(partial(self._read_some, size))):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()
        super().close()

    def _retry(self, action: Callable[[], bytes]) -> bytes:
        """Run an action, and retry it after temporary failures."""
        while True:
            delay = None
            try:
                found = action()
            except NetworkError as error:
                self._disconnect()
                if not error.temporary:
                    raise
                problem, delay = str(error), error.retry_after
            except BROKEN as error:
                self._disconnect()
                problem = f"{self.url}: the connection broke ({getattr(error, 'strerror', None) or error})"
            else:
                if found:
                    self._failures = 0
                return found
            self._failures += 1
            if self._failures >= self._attempts:
                reached = f"; {self._position:,} bytes had been read" if self._position else ""
                raise NetworkError(f"{problem}; gave up after {self._failures} attempts{reached}")
            wait = min(_MAX_DELAY, 2.0 ** (self._failures - 1) if delay is None else delay)
            self._say(f"{problem}; trying again in {wait:.0f} s")
            self._pause(wait)

    def _read_some(self, size: int) -> bytes:
        """Read up to ``size`` bytes from the position on; none at the end of the file."""
        while True:
            if self.size is not None and self._position >= self.size:
                return b""
            far = not self._at <= self._position <= self._at + _SKIP
            if self._response is None or (far and self.ranges) or self._position < self._at:
                self._connect()
            assert self._response is not None
            gap = self._position - self._at
            piece = self._response.read(min(gap, MAX_READ) if gap else size)
            self._at += len(piece)
            if piece and not gap:
                self._position = self._at
                return piece
            if not piece:
                if self._at == self._end:  # the server sent a shorter part than requested
                    self._disconnect()
                elif self._end is None:
                    return b""
                else:
                    raise OSError("it was closed early")

    def _connect(self) -> bytes:
        """Request all bytes from the position on."""
        self._disconnect()
        wanted = self._position
        try:
            response = open_url(
                self.url,
                headers={"Range": f"bytes={wanted}-"},
                secrets=self._secrets,
                timeout=self._timeout,
            )
        except NetworkError as error:
            if error.status == 416:
                raise NetworkError(
                    f"{self.url}: the file ends before byte {wanted:,}: it is truncated", status=416
                ) from None
            raise
        self._response = response
        self._at, self._end, size = self._span(response, wanted)
        self.ranges = response.status == 206
        version = size, response.headers.get("ETag", "")
        if self.version is not None and version != self.version:
            raise NetworkError(
                f"{self.url}: the file changed on the server while it was read, or the server sends wrong parts of "
                "it; run the same command again"
            )
        self.version, self.size = version, size
        hashes = ",".join(response.headers.get_all("x-goog-hash") or ())
        md5 = re.search(r"\bmd5=([A-Za-z0-9+/]{22}==)", hashes)
        self.md5 = None if md5 is None else base64.b64decode(md5[1])
        return b""

    def _span(self, response: http.client.HTTPResponse, wanted: int) -> tuple[int, int | None, int | None]:
        """Return the first byte and the end of an answer within the file, and the file's size."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise NetworkError(
                f"{self.url}: the server compresses the file without being asked; use another mirror"
            )
        if response.status == 206:
            given = response.headers.get("Content-Range", "")
            found = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", given)
            if found is None or int(found[1]) != wanted or not wanted <= int(found[2]) < int(found[3]):
                raise NetworkError(
                    f"{self.url}: expected bytes from {wanted:,} on, found {given[:60]!r}; download the file from "
                    "another server"
                )
            return wanted, int(found[2]) + 1, int(found[3])
        length = response.headers.get("Content-Length", "")
        if response.status != 200:
            raise NetworkError(f"{self.url}: the server answers {response.status}, without the file")
        size = int(length) if re.fullmatch(r"\d{1,15}", length) else None
        return 0, size, size

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None
