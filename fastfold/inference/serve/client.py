"""Python client of a server, on the standard library alone."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastfold.errors import ConfigError, FastFoldError, InputError, NetworkError
from fastfold.inference.serve.queue import FINAL
from fastfold.utils.atomic_files import prepare_output_directory, replacing
from fastfold.utils.download.http import BROKEN, check_url, open_url
from fastfold.utils.download.remote_file import RemoteFile, append_bytes
from fastfold.utils.foreign_text import parse_json, printable, shown

VARIABLE = "FASTFOLD_TOKEN"  #: Environment variable with the token of a user
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
_PIECE = 1 << 20
_MAX_ANSWER = 1 << 24  # bytes of an answer or of an event
_STATES = ("queued", "running", *FINAL)

Job = dict[str, Any]
"""Job as the server describes it: ``id``, ``state``, ``text``, ``scores``, ``files`` and so on."""


class RefusedError(FastFoldError):
    """Error for a request that the server refuses, in the server's words.

    Example:
        >>> from fastfold.inference.serve import RefusedError
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

    Raises:
        ConfigError: The address is invalid.

    Example:
        >>> from fastfold.inference.serve import Client
        >>> client = Client("http://127.0.0.1:8470", token="of_the_user")
        >>> job = client.submit("MTYKLILNGK", settings={"num_recycles": 1})  # doctest: +SKIP
        >>> job["state"], len(client.jobs())  # doctest: +SKIP
        ('queued', 1)
    """

    def __init__(self, server: str, token: str | None = None, *, patience: float = 60.0) -> None:
        self._server = check_url(server, setting="server")
        token = token or os.environ.get(VARIABLE)
        self._secrets = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience = patience

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
        given = {"sequence": sequence, "fasta": fasta, "a3m": a3m}
        body: dict[str, Any] = {kind: text for kind, text in given.items() if text is not None}
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
        last, state = "0", ""
        end, delay = time.monotonic() + self._patience, _FIRST_DELAY_S
        while state not in FINAL:
            with contextlib.suppress(*BROKEN), self._open(path, headers={"Last-Event-ID": last}) as answer:
                for fields in self._event_fields(path, answer):
                    end, delay = time.monotonic() + self._patience, _FIRST_DELAY_S
                    last = fields.get("id", last)
                    if fields.get("event") not in ("progress", "state"):
                        continue
                    data = self._parsed(path, fields.get("data", "null"))
                    if fields["event"] == "state":
                        described = self._job(path, data)
                        state = described["state"]
                        yield "state", described
                    elif isinstance(data, dict) and isinstance(data.get("line"), str):
                        yield "progress", printable(data["line"])
                    else:
                        raise self._foreign(path, data)
            if state not in FINAL:
                if time.monotonic() + delay > end:
                    raise NetworkError(f"{self._server}{path}: the stream ends without an event")
                time.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY_S)

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
        found: Job = {}
        for kind, value in self.events(job):
            if kind == "progress":
                on_line(value)
            else:
                found = value
        return found

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
            if not name or name.startswith(".") or set(name) & set("/\\\0:"):
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
        """Write a file of the server, resumed after broken connections, with all the bytes that it announces."""
        attempts = 1 + int(math.log2(1.0 + self._patience))  # pauses double, from a second on
        try:
            with RemoteFile(self._server + path, secrets=self._secrets, attempts=attempts) as remote:
                if remote.size is None:
                    raise NetworkError(f"{self._server}{path}: the server does not state the file's size")
                append_bytes(
                    remote, place, name=place.name, offset=0, size=remote.size, say=_ignore, progress=_ignore
                )
        except EOFError:
            raise NetworkError(f"{self._server}{path}: the file ends too early") from None
        except NetworkError as error:
            if error.status is not None and not error.temporary:
                raise RefusedError(error.explanation or str(error), error.status) from error
            raise

    def _json(self, path: str, **request: Any) -> Any:
        with self._open(path, **request) as answer:
            try:
                text = answer.read(_MAX_ANSWER + 1)
            except BROKEN as error:
                raise NetworkError(f"{self._server}{path}: the answer cannot be read: {error}") from error
        if len(text) > _MAX_ANSWER:
            raise NetworkError(f"{self._server}{path}: the answer is larger than {_MAX_ANSWER:,} bytes")
        return self._parsed(path, text)

    def _parsed(self, path: str, text: str | bytes) -> Any:
        try:
            return parse_json(
                text, self._server + path, remedy="is this the address of a server of FastFold?"
            )
        except InputError as error:
            raise NetworkError(str(error)) from None

    def _job(self, path: str, content: Any) -> Job:
        """Check the description of a job, and remove control characters from its texts."""
        if not isinstance(content, dict):
            raise self._foreign(path, content)
        texts = {key: content.get(key) for key in ("id", "name", "state", "text")}
        files, scores = content.get("files"), content.get("scores")
        if (
            not all(isinstance(text, str) for text in texts.values())
            or texts["state"] not in _STATES
            or not (isinstance(files, list) and all(isinstance(name, str) for name in files))
            or not isinstance(scores, dict)
            or not isinstance(content.get("position"), int | None)
        ):
            raise self._foreign(path, content)
        return content | {key: printable(str(text)) for key, text in texts.items()}

    def _foreign(self, path: str, content: Any) -> NetworkError:
        return NetworkError(
            f"{self._server}{path}: expected a job of FastFold, found {shown(content)}; is this the address of a "
            "server of FastFold?"
        )

    def _open(self, path: str, **request: Any) -> Any:
        """Send a request, repeated while the server cannot be reached."""
        end, delay = time.monotonic() + self._patience, _FIRST_DELAY_S
        while True:
            try:
                return open_url(self._server + path, secrets=self._secrets, **request)
            except NetworkError as error:
                if error.status is not None and error.status not in (502, 503, 504):
                    raise RefusedError(error.explanation or str(error), error.status) from error
                if time.monotonic() + delay > end:
                    raise
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)


def _ignore(*_: object) -> None:
    """Report nothing."""


def read_templates(paths: Sequence[Path]) -> dict[str, str]:
    """Return the content of template structures by name, or raise ConfigError or InputError."""
    from fastfold.utils.text_files import read_text_bytes

    found: dict[str, str] = {}
    for path in paths:
        name = path.name.removesuffix(".gz")
        if name in found:
            raise ConfigError(f"--templates: two files are named {name}; rename one")
        found[name] = read_text_bytes(path, limit=_PIECE << 6).decode("utf-8", "replace")
    return found
