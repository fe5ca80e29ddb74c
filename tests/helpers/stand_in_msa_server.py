"""A server on this machine that speaks the protocol of MSA servers, and is as broken as a test wants it."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from tests.helpers.loopback import Loopback, Request, loopback

ENVIRONMENT = "bfd.mgnify30.metaeuk30.smag30.a3m"


def tar_gz(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    """An archive of files, the same whenever it is made; a member may be a header alone."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in members.items():
            member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            else:
                archive.addfile(member)
    return buffer.getvalue()


def variant(sequence: str, number: int) -> str:
    """A sequence that is aligned to another: one letter changed, and one inserted after it."""
    at = number % len(sequence)
    return (
        f"{sequence[:at]}{'W' if sequence[at] != 'W' else 'A'}{'k' if number % 2 else ''}{sequence[at + 1 :]}"
    )


@dataclass
class StandIn:
    """How the server answers.

    Attributes:
        states: What it says before ``COMPLETE``, one for each time that it is asked.
        extra: Further files of each result.
        results: Results in place of its own, by the name of the endpoint.
        rows: How many rows each search finds.
        answers: Whole answers in place of its own, status and body, one for each request; None for its own.
        drops: After how many bytes downloads break, one for each download; None for not at all.
    """

    states: list[str] = field(default_factory=list)
    extra: dict[str, bytes] = field(default_factory=dict)
    results: dict[str, bytes] = field(default_factory=dict)
    rows: int = 3
    answers: list[tuple[int, bytes] | None] = field(default_factory=list)
    drops: list[int | None] = field(default_factory=list)
    queries: list[tuple[str, str, list[str]]] = field(default_factory=list)

    def __call__(self, request: Request) -> None:
        """Answer a request."""
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            request.send(*answer)
        elif request.path.startswith("/template/"):
            request.send(200, self.results["template"])
        elif request.path.startswith("/result/download/"):
            number = int(request.path.rpartition("-")[2])
            drop = self.drops.pop(0) if self.drops else None
            request.send(200, self.result(*self.queries[number]), drop_after=drop)
        else:
            if request.method == "POST":
                form = parse_qs(request.body.decode())
                sequences = [line for line in form["q"][0].split("\n") if line and not line.startswith(">")]
                kind = request.path.removeprefix("/ticket/")
                self.queries.append((kind, form.get("mode", [""])[0], sequences))
            status = self.states.pop(0) if self.states else "COMPLETE"
            ticket = {"id": f"t-{len(self.queries) - 1}", "status": status}
            request.send(200, json.dumps(ticket).encode())

    def result(self, kind: str, mode: str, sequences: Sequence[str]) -> bytes:
        """The archive of a query."""
        if kind in self.results:
            return self.results[kind]
        if kind == "pair":
            return tar_gz({"pair.a3m": self.alignments(sequences, "P"), "pair.sh": b"", **self.extra})
        files = {"uniref.a3m": self.alignments(sequences, "U"), "msa.sh": b"#"}
        if mode == "env":
            files[ENVIRONMENT] = self.alignments(sequences, "E")
        return tar_gz({**files, **self.extra})

    def alignments(self, sequences: Sequence[str], prefix: str) -> bytes:
        """An alignment of each sequence, ended by NUL."""
        blocks = []
        for i, sequence in enumerate(sequences):
            rows = [(f"{prefix}{i}_{j}\t0.9", variant(sequence, j)) for j in range(self.rows)]
            if prefix == "P" and i == 0:
                rows[-1] = ("DUMMY", "-" * len(sequence))
            text = "".join(f">{name}\n{row}\n" for name, row in [(str(101 + i), sequence), *rows])
            blocks.append(text.encode() + b"\0")
        return b"".join(blocks)


@contextmanager
def msa_server(stand_in: StandIn) -> Iterator[Loopback]:
    """Serve until the end of the block."""
    with loopback(stand_in) as server:
        yield server


def bomb(unpacked: int) -> bytes:
    """A small archive of one file that unpacks to very much."""
    head = tarfile.TarInfo("uniref.a3m")
    head.size = unpacked
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb") as packed:
        packed.write(head.tobuf(tarfile.GNU_FORMAT))
        for _ in range(unpacked >> 20):
            packed.write(bytes(1 << 20))
    return buffer.getvalue()
