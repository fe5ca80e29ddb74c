"""Python client of a server, on the standard library alone."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastfold.errors import ConfigError, FastFoldError, NetworkError, printable
from fastfold.products.serve.queue import FINAL
from fastfold.utils.atomic_files import prepare_output_directory, replacing
from fastfold.utils.download.answers import Retries, Say, json_answer, read_answer, tell_nobody
from fastfold.utils.download.http import BROKEN, check_url, open_url
from fastfold.utils.download.pieces import copy_piece, remote_piece
from fastfold.utils.download.remote_file import RemoteFile
from fastfold.utils.foreign_text import shown

VARIABLE = "FASTFOLD_TOKEN"  #: Environment variable with the token of a user
_MAX_TEMPLATE = 1 << 26  # bytes
_MAX_ANSWER = 1 << 24  # bytes of an answer or of an event
_MAX_FILE = 1 << 34  # bytes
_SERVER = "a server of FastFold"
_UNREACHABLE = (502, 503, 504)  # statuses of a proxy without a server, or of a server that is busy
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")  # a part of addresses and of names of folders
_STATES = ("queued", "running", *FINAL)

Job = dict[str, Any]
"""Job as the server describes it: ``id``, ``state``, ``text``, ``scores``, ``files`` and so on."""


class RefusedError(FastFoldError):
    """Error for a request that the server refuses, in the server's words.

    Example:
        >>> from fastfold.products.serve import RefusedError
        >>> RefusedError("the target does not fit", 422).status
        422
    """

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class Client:
    """Client of a ``fastfold serve`` server.

    Requests are repeated while the server cannot be reached, so a restart of the server does not end a wait.

    Args:
        server: Address, for example ``http://127.0.0.1:8470``.
        token: Token of the user; None for that of the environment variable ``FASTFOLD_TOKEN``, if there is one.
        patience: Seconds for which an unreachable server is tried again.
        say: Called with a line about each pause of such attempts.

    Raises:
        ConfigError: The address is invalid.

    Example:
        >>> from fastfold.products.serve import Client
        >>> client = Client("http://127.0.0.1:8470", token="of_the_user")
        >>> job = client.submit("MTYKLILNGK", settings={"num_recycles": 1})  # doctest: +SKIP
        >>> job["state"], len(client.jobs())  # doctest: +SKIP
        ('queued', 1)
    """

    def __init__(
        self, server: str, token: str | None = None, *, patience: float = 60.0, say: Say = tell_nobody
    ) -> None:
        self._server = check_url(server, setting="server")
        token = token or os.environ.get(VARIABLE)
        self._secrets = {"Authorization": f"Bearer {token}"} if token else {}
        self._say = say
        self._attempts = 1 + math.ceil(math.log2(1.0 + patience))  # pauses double, from a second on

    def submit(
        self,
        sequence: str | None = None,
        *,
        fasta: str | None = None,
        a3m: str | None = None,
        name: str = "",
        complex: bool = False,
        templates: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        priority: int = 0,
        key: str | None = None,
    ) -> Job:
        """Submit a target in one of three formats; requests repeated after a broken connection are one job.

        Args:
            sequence: One letter per residue; ``:`` joins the chains of a complex.
            fasta: Content of a FASTA file with one target.
            a3m: Content of an A3M file: a target with its alignment.
            name: Name of the target in files; empty for the name in the text.
            complex: True if all records of ``fasta`` are one complex.
            templates: Content of each template structure (mmCIF or PDB) by its name.
            settings: Settings of the fold, for example ``num_recycles`` and ``seeds``; docs/serve.md lists them.
            priority: Jobs of higher priority start first, -10 to 10.
            key: Name of this submission, by which the server recognises a repeated one; None for a random one.

        Raises:
            RefusedError: The target or a setting is invalid, does not fit, or a limit is reached.
            NetworkError: The server cannot be reached.
        """
        texts = {"sequence": sequence, "fasta": fasta, "a3m": a3m}
        body: dict[str, Any] = {kind: text for kind, text in texts.items() if text is not None}
        body |= {"name": name, "complex": complex, "priority": priority, "settings": dict(settings or {})}
        body["templates"] = [{"name": k, "text": text} for k, text in (templates or {}).items()]
        headers = {"Content-Type": "application/json", "Idempotency-Key": key or secrets.token_hex(16)}
        return self._job("/v1/jobs", self._json("/v1/jobs", data=json.dumps(body).encode(), headers=headers))

    def job(self, job: str) -> Job:
        """Return a job; RefusedError if the user has no such job, NetworkError without a server."""
        path = f"/v1/jobs/{quote(job, safe='')}"
        return self._job(path, self._json(path))

    def jobs(self) -> list[Job]:
        """Return the last jobs of the user, in the order of admission."""
        answer = self._json("/v1/jobs")
        if not isinstance(answer, list):
            raise self._foreign("/v1/jobs", answer)
        return [self._job("/v1/jobs", one) for one in answer]

    def events(self, job: str) -> Iterator[tuple[str, Any]]:
        """Yield progress of a job until its answer: ``("progress", line)`` and ``("state", job)``.

        After a broken connection the stream continues behind the last event. Errors are those of :meth:`job`, after the
        patience; a NetworkError also tells that an answer is not of a server of FastFold.
        """
        path = f"/v1/jobs/{quote(job, safe='')}/events"
        last, state, retries = "0", "", self._retries()
        while state not in FINAL:
            with contextlib.suppress(*BROKEN), self._open(path, headers={"Last-Event-ID": last}) as answer:
                for fields in self._event_fields(path, answer):
                    retries.reset()
                    last = fields.get("id", last)
                    if fields.get("event") in ("progress", "state"):
                        kind, value = self._event(path, fields)
                        state = value["state"] if kind == "state" else state
                        yield kind, value
            if state not in FINAL:
                ended = f"{self._server}{path}: the stream ends without an answer"
                retries.failed(NetworkError(ended, temporary=True))

    def _event(self, path: str, fields: Mapping[str, str]) -> tuple[str, Any]:
        data = json_answer(self._server + path, fields.get("data", "null"), server=_SERVER)
        if fields["event"] == "state":
            return "state", self._job(path, data)
        if not isinstance(data, dict) or not isinstance(data.get("line"), str):
            raise self._foreign(path, data)
        return "progress", printable(data["line"])

    def _event_fields(self, path: str, answer: Any) -> Iterator[dict[str, str]]:
        """Yield the fields of each complete server-sent event."""
        fields: dict[str, str] = {}
        while raw := answer.readline(_MAX_ANSWER + 1):
            if len(raw) > _MAX_ANSWER or len(fields) > 100:
                raise NetworkError(f"{self._server}{path}: an event has no end")
            if line := raw.decode("utf-8", "replace").rstrip("\r\n"):
                name, _, value = line.partition(":")
                fields[name] = value.removeprefix(" ")
            else:
                yield fields
                fields = {}

    def wait(self, job: str, on_line: Callable[[str], None] = lambda _: None) -> Job:
        """Wait for the answer to a job; return the job. Errors are those of :meth:`events`.

        ``on_line`` is called with each line of its progress.
        """
        answered: Job = {}
        for kind, value in self.events(job):
            if kind == "progress":
                on_line(value)
            else:
                answered = value
        return answered

    def download(
        self, job: Job, folder: str | os.PathLike[str], names: Sequence[str] | None = None
    ) -> list[Path]:
        """Write files of an answered job to a folder, created if needed; all of them by default.

        A NetworkError tells that the server cannot be reached or a name could leave the folder, a WriteError that a
        file cannot be written.
        """
        place = prepare_output_directory(folder)
        written = []
        for name in job["files"] if names is None else names:
            if not name.isprintable() or name[:1] in ("", ".") or set(name) & set("/\\:"):
                raise NetworkError(f"{self._server}: expected the name of a file, found {name!r:.80}")
            with replacing(place / name) as temporary:
                self._download(
                    f"/v1/jobs/{quote(job['id'], safe='')}/files/{quote(name, safe='')}", temporary
                )
            written.append(place / name)
        return written

    def remove(self, job: str) -> None:
        """Cancel a waiting job, or remove an answered one with its files; RefusedError if it is running."""
        with self._open(f"/v1/jobs/{quote(job, safe='')}", method="DELETE"):
            pass

    def _download(self, path: str, place: Path) -> None:
        """Write a file of the server, resumed after broken connections."""
        with (
            _refusals(),
            RemoteFile(self._server + path, secrets=self._secrets, retries=self._retries()) as remote,
        ):
            piece = remote_piece(remote, place.name)
            if piece.size > _MAX_FILE:
                raise NetworkError(
                    f"{self._server}{path}: expected a file of results, found {piece.size:,} bytes"
                )
            copy_piece(piece, place)

    def _json(self, path: str, **request: Any) -> Any:
        url = self._server + path
        with _refusals():
            text = read_answer(
                url, limit=_MAX_ANSWER, secrets=self._secrets, retries=self._retries(), **request
            )
        return json_answer(url, text, server=_SERVER)

    def _job(self, path: str, content: Any) -> Job:
        """Check the description of a job, and remove control characters from its texts."""
        if not isinstance(content, dict):
            raise self._foreign(path, content)
        texts = {key: content.get(key) for key in ("id", "name", "state", "text")}
        files, scores = content.get("files"), content.get("scores")
        if (
            not all(isinstance(text, str) for text in texts.values())
            or _ID.fullmatch(str(texts["id"])) is None
            or texts["state"] not in _STATES
            or not (isinstance(files, list) and all(isinstance(name, str) for name in files))
            or not isinstance(scores, dict)
            or not isinstance(content.get("position"), int | None)
        ):
            raise self._foreign(path, content)
        return content | {key: printable(str(text)) for key, text in texts.items()}

    def _foreign(self, path: str, content: Any) -> NetworkError:
        return NetworkError(
            f"{self._server}{path}: expected a job, found {shown(content)}; is this the address of {_SERVER}?"
        )

    def _open(self, path: str, **request: Any) -> Any:
        """Send a request, repeated while the server cannot be reached."""
        url = self._server + path
        with _refusals():
            return self._retries().run(url, lambda: open_url(url, secrets=self._secrets, **request))

    def _retries(self) -> Retries:
        return Retries(self._attempts, statuses=_UNREACHABLE, say=self._say)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise RefusedError for an answer that refuses a request."""
    try:
        yield
    except NetworkError as error:
        if error.status is None or error.status in _UNREACHABLE:
            raise
        raise RefusedError(error.explanation or str(error), error.status) from error


def read_templates(paths: Sequence[Path]) -> dict[str, str]:
    """Return the content of template structures by name, or raise ConfigError or InputError."""
    from fastfold.utils.text_files import read_text_bytes

    contents: dict[str, str] = {}
    for path in paths:
        name = path.name.removesuffix(".gz")
        if name in contents:
            raise ConfigError(f"`templates`: two files are named {name}; rename one")
        contents[name] = read_text_bytes(path, limit=_MAX_TEMPLATE).decode("utf-8", "replace")
    return contents
