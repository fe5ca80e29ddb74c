"""Targets get the alignments of a server: each sequence is sent once, and what is there is not asked for again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastfold.data.msa.find import load_alignments
from fastfold.data.search.colabfold.msa_server import MsaServer, TicketServer
from fastfold.data.search.colabfold.source import search_colabfold
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import FastFoldError, InputError, NetworkError
from tests.conftest import REPOSITORY
from tests.helpers.stand_in_msa_server import ENVIRONMENT, StandIn, msa_server, tar_gz, variant

A, B = "MKVLAAGIT", "GSHMWLPEK"


def search(
    url: str, targets: list[Target], out: Path, said: list[str] | None = None
) -> list[tuple[Target, InputError]]:
    """Search by a client that does not wait."""
    say = (said if said is not None else []).append
    server = TicketServer(url, pause=lambda seconds: None, timeout_s=5)
    return search_colabfold(targets, MsaServer(server, say=say), out, say=say)


def test_a_chain_gets_its_alignment(tmp_path: Path) -> None:
    target, said = target_from_sequence(A, "protein"), list[str]()
    with msa_server(StandIn(["PENDING"])) as server:
        assert search(server.url, [target], tmp_path, said) == []
    assert said == [
        f"SearchSources.server: leaving this machine for {server.url}, whose owner can read and keep the data: "
        "1 sequence (9 residues)"
    ]
    (((msa,), paired),) = load_alignments(tmp_path, target)
    rows = [variant(A, i).replace("k", "") for i in range(3)]
    assert msa.sequences == (A, *rows, A, *rows)
    assert paired == []


def test_each_sequence_is_sent_once_and_never_again(tmp_path: Path) -> None:
    targets = [
        target_from_sequence(sequence, name)
        for name, sequence in {
            "a": A,
            "same": A,
            "dimer": f"{A}:{B}",
            "again": f"{A}:{B}",
            "homo": f"{A}:{A}",
        }.items()
    ]
    stand_in = StandIn()
    with msa_server(stand_in) as server:
        assert search(server.url, targets, tmp_path) == []
        assert stand_in.queries == [("msa", "env", [A]), ("msa", "env", [B]), ("pair", "pairgreedy", [A, B])]
        number, said = len(server.requests), list[str]()
        more = [*targets, target_from_sequence(f"{A}:{A}:{B}", "trimer")]
        assert search(server.url, more, tmp_path, said) == []
        assert (len(server.requests), said) == (number, [])
    (first, second, third) = load_alignments(tmp_path, more[-1])
    assert first == second
    assert [len(msa.sequences) for msa in (*first[1], *third[1])] == [3, 3]  # without the row of DUMMY


def test_a_complex_has_the_features_of_colabfolds_file(tmp_path: Path) -> None:
    """Rows that belong together stay together; each chain's own rows follow."""
    target = target_from_sequence(f"{A}:{B}", "dimer")
    with msa_server(StandIn()) as server:
        search(server.url, [target], tmp_path)
    (first, second) = load_alignments(tmp_path, target)
    assert first[1][0].sequences == (A, *(variant(A, i).replace("k", "") for i in range(2)))
    assert second[1][0].sequences == (B, *(variant(B, i).replace("k", "") for i in range(2)))
    assert first[1][0].as_is
    # The last pair has a gap for the first chain, so that it is the second chain's own.
    assert second[0][0].sequences[0] == variant(B, 2)


def test_template_hits_are_mentioned_once(tmp_path: Path) -> None:
    targets = [target_from_sequence(A, "a"), target_from_sequence(B, "b")]
    said: list[str] = []
    with msa_server(StandIn(extra={"pdb70.m8": b"101\t1abc_A\t0.9\n"})) as server:
        search(server.url, targets, tmp_path, said)
    assert len([line for line in said if "template hits (pdb70.m8), which are not used" in line]) == 1


def test_a_pair_that_the_server_cannot_do_fails_its_complex_alone(tmp_path: Path) -> None:
    targets = [target_from_sequence(f"{A}:{B}", "dimer"), target_from_sequence(B, "b")]
    with msa_server(StandIn(["COMPLETE", "COMPLETE", "ERROR"])) as server:
        ((failed, error),) = search(server.url, targets, tmp_path)
        assert failed is targets[0]
        assert (tmp_path / "b" / "colabfold_hits.a3m").is_file()
        assert str(error).startswith("record 'dimer': http://")


def test_maintenance_ends_the_search(tmp_path: Path) -> None:
    with (
        msa_server(StandIn(["MAINTENANCE"])) as server,
        pytest.raises(NetworkError, match="under maintenance"),
    ):
        search(server.url, [target_from_sequence(A, "a")], tmp_path)


def test_a_failure_keeps_what_was_found(tmp_path: Path) -> None:
    targets = [
        target_from_sequence(f"{A}:{B}", "dimer"),
        target_from_sequence(A, "a"),
        target_from_sequence(B, "b"),
    ]
    stand_in = StandIn(["COMPLETE", "ERROR"])
    with msa_server(stand_in) as server:
        failures = search(server.url, targets, tmp_path)
        assert [target.name for target, error in failures if "failed on this query" in str(error)] == [
            "dimer",
            "b",
        ]
        assert [query[2] for query in stand_in.queries] == [
            [A],
            [B],
        ]  # no pairs of a chain without an alignment
        assert (tmp_path / "a" / "colabfold_hits.a3m").is_file()
        assert not (tmp_path / "b").exists()
        stand_in.queries.clear()
        assert search(server.url, targets, tmp_path) == []
    assert [query[2] for query in stand_in.queries] == [[B], [A, B]]
    assert all((tmp_path / name / "colabfold_hits.a3m").is_file() for name in ("a", "b", "dimer"))


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (tar_gz({"msa.sh": b"x"}), "lacks uniref.a3m"),
        (tar_gz({"uniref.a3m": f">101\n{B}\n".encode()}), "another sequence|query"),
        (tar_gz({"uniref.a3m": f">101\n{A}\n>x\nMK\n".encode()}), "columns"),
        (
            tar_gz({"uniref.a3m": f">101\n{A}\n".encode(), ENVIRONMENT: b"<html>"}),
            "expected the alignment of a query",
        ),
        (tar_gz({"../uniref.a3m": b""}), "leads out"),
        (b"nonsense", "damaged or truncated"),
    ],
)
def test_a_result_that_cannot_be_used_leaves_nothing(tmp_path: Path, result: bytes, expected: str) -> None:
    with msa_server(StandIn(results={"msa": result})) as server, pytest.raises(InputError, match=expected):
        search(server.url, [target_from_sequence(A, "a")], tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_pairs_that_cannot_be_used_leave_no_alignment(tmp_path: Path) -> None:
    short = tar_gz({"pair.a3m": f">101\n{A}\n>x\n{A}\n\0>102\n{B}\n\0".encode()})
    with (
        msa_server(StandIn(results={"pair": short})) as server,
        pytest.raises(InputError, match="found 2, 1"),
    ):
        search(server.url, [target_from_sequence(f"{A}:{B}", "dimer")], tmp_path)
    assert not (tmp_path / "dimer").exists()


def test_alignments_of_others_are_not_touched_and_nothing_is_sent(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    mine = tmp_path / "a" / "colabfold_hits.a3m"
    mine.write_text(f">x\n{A}\n")
    with msa_server(StandIn()) as server:
        assert search(server.url, [target_from_sequence(A, "a")], tmp_path) == []
    assert server.requests == []
    assert mine.read_text() == f">x\n{A}\n"


def test_the_chains_without_an_alignment_are_sent_and_all_are_paired(tmp_path: Path) -> None:
    """The result is that of a search for all chains, but for the rows of the chain that has an alignment."""
    target, stand_in = target_from_sequence(f"{A}:{B}", "dimer"), StandIn()
    mine = tmp_path / "mine" / "dimer" / "A.a3m"
    mine.parent.mkdir(parents=True)
    mine.write_text(f">x\n{A}\n")
    with msa_server(stand_in) as server:
        search(server.url, [target], tmp_path / "mine")
        assert stand_in.queries == [("msa", "env", [B]), ("pair", "pairgreedy", [A, B])]
        search(server.url, [target], tmp_path / "all")
    first, second = load_alignments(tmp_path / "mine", target)
    whole = load_alignments(tmp_path / "all", target)
    assert [msa.sequences for msa in first[0]] == [(A,)]
    assert [msa.sequences for pairs in (first[1], second[1]) for msa in pairs] == [
        msa.sequences for _, pairs in whole for msa in pairs
    ]
    assert set(whole[1][0][0].sequences) <= set(second[0][0].sequences)
    mine.unlink()
    with msa_server(stand_in) as server:
        search(server.url, [target], tmp_path / "mine")  # the layout of a search for all chains again
    files = [
        sorted(p.relative_to(tmp_path / name) for p in (tmp_path / name / "dimer").rglob("*"))
        for name in ("mine", "all")
    ]
    assert files[0] == files[1]


def test_letters_beyond_the_twenty_are_sent_as_they_are(tmp_path: Path) -> None:
    target = target_from_sequence("MKUV", "seleno")
    stand_in = StandIn()
    with msa_server(stand_in) as server:
        search(server.url, [target], tmp_path)
    assert stand_in.queries[0][2] == ["MKUV"]
    (((msa,), _),) = load_alignments(tmp_path, target)
    assert len(msa.sequences) == 8


CLIENT = """
import sys
from pathlib import Path
from fastfold.data.search.colabfold.msa_server import MsaServer
from fastfold.data.search.colabfold.source import search_colabfold
from fastfold.data.search.colabfold.msa_server import TicketServer
from fastfold.data.targets import target_from_sequence
targets = [target_from_sequence(text, f"t{i}") for i, text in enumerate(sys.argv[3:])]
server = TicketServer(sys.argv[1], pause=lambda seconds: __import__("time").sleep(0.01))
print(search_colabfold(targets, MsaServer(server), Path(sys.argv[2])))
"""


def test_a_killed_search_goes_on(tmp_path: Path) -> None:
    stand_in = StandIn(["COMPLETE", *["RUNNING"] * 100_000])
    with msa_server(stand_in) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, server.url, str(tmp_path / "out"), A, B],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        end = time.monotonic() + 100
        while len(stand_in.queries) < 2 and time.monotonic() < end:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()
        process.communicate()
        stand_in.states.clear()
        stand_in.queries.clear()
        targets = [target_from_sequence(A, "t0"), target_from_sequence(B, "t1")]
        assert search(server.url, targets, tmp_path / "out") == []
        assert [query[2] for query in stand_in.queries] == [[B]]
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_server_that_goes_away_is_an_error_of_ours(tmp_path: Path) -> None:
    with msa_server(StandIn()) as server:
        url = server.url
    with pytest.raises(FastFoldError, match="cannot reach"):
        search(url, [target_from_sequence(A, "a")], tmp_path)
