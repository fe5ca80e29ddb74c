"""Accessions are read only where downloads are allowed, from a server that may answer anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastfold.data.queries import accessions
from fastfold.data.queries.accessions import accessions_of
from fastfold.data.queries.read import read_targets
from fastfold.utils.download.answers import Retries
from tests.helpers.command_line import CommandLine
from tests.helpers.command_line import cli as cli
from tests.helpers.loopback import Loopback, Request, loopback

ENTRIES = {
    "P69905": b">sp|P69905|HBA_HUMAN Hemoglobin subunit alpha\nMVLSPADKTN\nVKAAWGKVGA\n",
    "P68871": b">sp|P68871|HBB_HUMAN Hemoglobin subunit beta\nMVHLTPEEKS\n",
    "Q00001": b"",
    "Q00002": b"<html>log in</html>",
    "Q00003": b">sp|Q00003|X\nMK\n>sp|Q00004|Y\nML\n",
}


def answer(request: Request) -> None:
    entry = ENTRIES.get(request.path.removeprefix("/").removesuffix(".fasta"))
    request.send(404 if entry is None else 200, entry or b"")


@pytest.fixture
def uniprot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    """A stand-in for UniProt."""
    with loopback(answer) as server:
        for module in ("accessions", "read"):
            monkeypatch.setattr(f"fastfold.data.queries.{module}.UNIPROT", server.url)
        yield server


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("P69905", ["P69905"]),
        ("A0A022YWF9", ["A0A022YWF9"]),
        ("AF-P69905-F1", ["P69905"]),
        ("AF-P69905-F1-model_v4", ["P69905"]),
        ("P69905:AF-P68871-F1", ["P69905", "P68871"]),
        ("AF-P69905-F2", []),  # a part of a long protein
        ("P6990", []),
        ("p69905", []),
        ("P69905.fasta", []),
        ("MKTAYIAKQR", []),
        ("", []),
    ],
)
def test_ids_are_told_from_files_and_sequences(text: str, found: list[str]) -> None:
    assert accessions_of(text) == found


def test_a_file_of_the_name_precedes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("P69905").write_text(">own\nMKV\n")
    targets, errors = read_targets(["P69905"], allow_download=True)
    assert ([target.name for target in targets], errors) == (["own"], [])


def test_nothing_is_asked_without_permission(uniprot: Loopback, cli: CommandLine) -> None:
    targets, errors = read_targets(["P69905"])
    assert targets == []
    assert "add allow_download=" in str(errors[0])
    done = cli.run("infer", "P69905", "--out", cli.out)
    assert done.code != 0
    assert "--allow-download" in done.err
    assert uniprot.requests == []


def test_sequences_are_those_of_the_entries(uniprot: Loopback) -> None:
    targets, errors = read_targets(["AF-P69905-F1", "P69905:P68871"], allow_download=True)
    assert errors == []
    assert [(one.name, [chain.sequence for chain in one.chains]) for one in targets] == [
        ("P69905", ["MVLSPADKTNVKAAWGKVGA"]),
        ("P69905_P68871", ["MVLSPADKTNVKAAWGKVGA", "MVHLTPEEKS"]),
    ]
    assert all(f"downloaded from {uniprot.url}" in " ".join(one.warnings) for one in targets)
    assert [request.path for request in uniprot.requests] == [
        "/P69905.fasta",
        "/P69905.fasta",
        "/P68871.fasta",
    ]


def test_an_entry_without_one_sequence_is_an_error_and_others_are_read(uniprot: Loopback) -> None:
    targets, errors = read_targets(["Q00001", "Q00002", "Q00003", "Q99999", "P68871"], allow_download=True)
    assert [one.name for one in targets] == ["P68871"]
    reasons = (
        "no sequence of this entry",
        "expected one FASTA record",
        "expected one FASTA record",
        "no such entry",
    )
    assert len(errors) == len(reasons)
    for error, reason in zip(errors, reasons, strict=True):
        assert reason in str(error)


def test_a_server_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def flaky(request: Request) -> None:
        asked.append(request.path)
        request.send(503 if len(asked) < 3 else 200, ENTRIES["P68871"])

    with loopback(flaky) as server:
        monkeypatch.setattr(accessions, "UNIPROT", server.url)
        fetched = accessions.fetch_sequence("P68871", Retries(pause=lambda seconds: None))
        assert (fetched, len(asked)) == ("MVHLTPEEKS", 3)


def test_the_command_folds_an_accession(uniprot: Loopback, cli: CommandLine) -> None:
    done = cli.run(
        "infer", "P68871", "--allow-download", "--out", cli.out, "--num-recycles", "0", "--no-plots"
    )
    assert done.code == 0, done.err
    assert next(cli.out.glob("P68871_rank_001_*.pdb")).is_file()
