"""Bearer tokens of a server's users, kept as hashes, and signed links to results."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from fastfold.errors import InputError
from fastfold.utils.text_files import read_text_bytes

LOCAL_USER = "local"  #: User of all requests to a server without tokens
MIN_TOKEN = 16  #: Smallest number of characters of a token
_LIMIT = 1 << 20
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = "sha256:"
_DAY_S = 24 * 3600
_LINK = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})-([0-9a-f]{64})")


class Tokens:
    """Users by the SHA-256 of their tokens."""

    def __init__(self, users: Mapping[bytes, str]) -> None:
        self._users = dict(users)

    def user(self, header: str | None) -> str | None:
        """Return the user of a header ``Authorization``; None for a missing or unknown token.

        The token is a bearer's, or the password that a browser asks for, with any name. All tokens are compared, each
        in constant time, so that the time tells nothing about them.
        """
        scheme, _, token = (header or "").partition(" ")
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                token = ""
        elif scheme.lower() != "bearer":
            return None
        digest = _digest(token.strip())
        matching = [user for known, user in self._users.items() if hmac.compare_digest(known, digest)]
        return matching[-1] if matching else None


class Links:
    """Signed names of jobs, by which a browser opens results without a token until the end of the next day (UTC).

    The key is random, so links of an earlier server are unknown.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def sign(self, job: str) -> str:
        """Return a signed name of a job for addresses; it is the same one all day."""
        last = int(time.time() // _DAY_S) + 1
        return f"{job}-{last}-{self._code(job, last)}"

    def job(self, link: str) -> str | None:
        """Return the job of a signed name; None if it is too old, or of another server."""
        parts = _LINK.fullmatch(link)
        if parts is None or int(parts[2]) < time.time() // _DAY_S:
            return None
        return parts[1] if hmac.compare_digest(self._code(parts[1], int(parts[2])), parts[3]) else None

    def _code(self, job: str, last: int) -> str:
        return hmac.digest(self._key, f"{job}-{last}".encode(), "sha256").hex()


def read_tokens(path: str | os.PathLike[str]) -> Tokens:
    """Read a file of tokens, ``USER TOKEN`` or ``USER sha256:HEX`` in each line, with comments after ``#``.

    An InputError tells that the file cannot be read, other users may read it, or a line is invalid.
    """
    path = Path(path)
    text = read_text_bytes(path, limit=_LIMIT).decode("utf-8", "replace")
    if os.name == "posix" and path.stat().st_mode & 0o007:
        raise InputError("all users of this machine may read the tokens; run: chmod o-rwx FILE", path=path)
    users: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not _USER.fullmatch(words[0]):
            raise InputError("expected a user and a token, for example: ada 3f9c…", path=path, line=number)
        user, token = words
        if token.startswith(_HASH):
            digits = token.removeprefix(_HASH)
            if not re.fullmatch("[0-9a-fA-F]{64}", digits):
                raise InputError("expected 64 hexadecimal digits after sha256:", path=path, line=number)
            digest = bytes.fromhex(digits)
        elif len(token) < MIN_TOKEN:
            raise InputError(
                f"the token has fewer than {MIN_TOKEN} characters; make one with: python -c 'import secrets; "
                "print(secrets.token_urlsafe())'",
                path=path,
                line=number,
            )
        else:
            digest = _digest(token)
        if digest in users:
            raise InputError(
                "the token is on an earlier line too; give each user another one", path=path, line=number
            )
        users[digest] = user
    if not users:
        raise InputError("expected a line with a user and a token, found none", path=path)
    return Tokens(users)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
