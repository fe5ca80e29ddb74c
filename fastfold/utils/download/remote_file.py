"""Files on a web server that are read like local ones, through broken connections."""

from __future__ import annotations

import base64
import http.client
import io
import math
import re
import time
from collections.abc import Callable, Mapping
from functools import partial

from fastfold.errors import NetworkError
from fastfold.utils.download.answers import Retries, stated_length, too_large, too_slow
from fastfold.utils.download.http import open_url

MAX_READ = 1 << 24  #: Maximum number of bytes of a read, so that no number in a foreign file reserves memory

_SKIP = 1 << 16  # bytes up to which reading and discarding is cheaper than another request
_PIECE = 1 << 20
_READ_S = 600.0  # for one read with its attempts, so that a dripping server is given up


class RemoteFile(io.RawIOBase):
    """File on a web server, read from any position.

    Each request asks for all bytes from a position on (``Range``, RFC 9110), so that a broken connection is reopened at
    its last position, and unused bytes are not sent. A server that ignores ranges sends the file from its beginning;
    bytes before the position are then discarded.

    Args:
        url: Address of the file.
        timeout: Seconds that a connection may be silent.
        seconds: Seconds in which all must have been read; a single read may take ten minutes.
        secrets: Headers with credentials, which no redirect gets.
        retries: Attempts without data before giving up; None for six.
        now: Clock that never goes back.

    Attributes:
        ranges: True if the server sends parts.
        size: Size of the file in bytes; None if the server does not report it.
        version: Size and entity tag of the file, which change with it.
        digest: Name and hexadecimal digits of the file's sum where the server sends it (``Repr-Digest`` of RFC 9530,
            or Google's ``x-goog-hash``), else None.

    Raises:
        NetworkError: The server cannot be reached, does not have the file, or sends an invalid answer.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        seconds: float = math.inf,
        secrets: Mapping[str, str] | None = None,
        retries: Retries | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.url = url
        self.ranges = False
        self.size: int | None = None
        self.version: tuple[int | None, str] | None = None
        self.digest: tuple[str, str] | None = None
        self._timeout, self._secrets, self._now = timeout, secrets, now
        self._retries = retries or Retries()
        self._seconds, self._end_time = seconds, now() + seconds
        self._position = 0
        self._response: http.client.HTTPResponse | None = None
        self._at = 0  # next byte of the response
        self._end: int | None = None  # end of the response
        self._retries.run(url, self._connect)

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
            NetworkError: The connection broke too often or is too slow, or the file changed meanwhile.
            ValueError: ``size`` is above :data:`MAX_READ`, or asks for the whole file.
        """
        if size is None or not 0 <= size <= MAX_READ:
            raise ValueError(f"a read of {size} bytes is not allowed")
        pieces = []
        limits = ((self._end_time, self._seconds), (self._now() + _READ_S, _READ_S))
        while size > 0 and (piece := self._retries.run(self.url, partial(self._read_some, size))):
            pieces.append(piece)
            size -= len(piece)
            for end, seconds in limits:
                if self._now() > end:
                    raise too_slow(self.url, seconds)
        return b"".join(pieces)

    def read_rest(self, *, limit: int) -> bytes:
        """Read all bytes from the position on.

        Raises:
            NetworkError: They are more than ``limit``; or see :meth:`read`.
        """
        pieces, size = [], 0
        while size <= limit and (piece := self.read(min(_PIECE, limit + 1 - size))):
            pieces.append(piece)
            size += len(piece)
        if size > limit:
            raise too_large(self.url, limit)
        return b"".join(pieces)

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()
        super().close()

    def _read_some(self, size: int) -> bytes:
        """Read up to ``size`` bytes from the position on; none at the end of the file."""
        try:
            while self.size is None or self._position < self.size:
                far = not self._at <= self._position <= self._at + _SKIP
                if self._response is None or (far and self.ranges) or self._position < self._at:
                    self._connect()
                assert self._response is not None
                gap = self._position - self._at
                wanted = min(gap, MAX_READ) if gap else size
                piece = self._response.read1(
                    wanted if self._end is None else min(wanted, self._end - self._at)
                )
                self._at += len(piece)
                if piece and not gap:
                    self._position = self._at
                    return piece
                if piece:
                    continue
                if self._end is None:
                    return b""
                if self._at < self._end:
                    raise OSError(f"closed after {self._at:,} of {self._end:,} bytes")
                self._disconnect()  # the server sent a shorter part than requested
            return b""
        except BaseException:
            self._disconnect()
            raise

    def _connect(self) -> None:
        """Request all bytes from the position on."""
        self._disconnect()
        wanted = self._position
        request = partial(open_url, self.url, secrets=self._secrets, timeout=self._timeout)
        try:
            response = request(headers={"Range": f"bytes={wanted}-"})
        except NetworkError as error:
            if error.status != 416:
                raise
            if wanted:
                raise NetworkError(
                    f"{self.url}: the file ends before byte {wanted:,}: it is truncated", status=416
                ) from None
            response = request()  # an empty file has no first byte
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
        self.digest = _stated_digest(response.headers)

    def _span(self, response: http.client.HTTPResponse, wanted: int) -> tuple[int, int | None, int | None]:
        """Return the first byte and the end of an answer within the file, and the file's size."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise NetworkError(
                f"{self.url}: the server compresses the file without being asked; use another mirror"
            )
        if response.status == 206:
            content_range = response.headers.get("Content-Range", "")
            match = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", content_range)
            if match is None or int(match[1]) != wanted or not wanted <= int(match[2]) < int(match[3]):
                raise NetworkError(
                    f"{self.url}: expected bytes from {wanted:,} on, found {content_range[:60]!r}; download the file "
                    "from another server"
                )
            return wanted, int(match[2]) + 1, int(match[3])
        if response.status != 200:
            raise NetworkError(f"{self.url}: the server answers {response.status}, without the file")
        size = stated_length(self.url, response.headers)
        return 0, size, size

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None


_DIGESTS = (
    ("repr-digest", "sha256", re.compile(r"\bsha-256=:([A-Za-z0-9+/]{43}=):")),
    ("x-goog-hash", "md5", re.compile(r"\bmd5=([A-Za-z0-9+/]{22}==)")),
)
"""Headers with a file's sum in base64, and the names of its kinds in :mod:`hashlib`."""


def _stated_digest(headers: http.client.HTTPMessage) -> tuple[str, str] | None:
    """Return kind and hexadecimal digits of the sum that an answer states, None if it states none."""
    for header, kind, pattern in _DIGESTS:
        if stated := pattern.search(",".join(headers.get_all(header) or ())):
            return kind, base64.b64decode(stated[1]).hex()
    return None
