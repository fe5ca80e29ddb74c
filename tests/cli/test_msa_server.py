"""``fastfold infer --msa-server`` folds with what a server finds, and sends nothing that it was not told to send."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from fastfold.cli import msa_server as option
from fastfold.errors import ConfigError
from tests.helpers.command_line import CommandLine
from tests.helpers.stand_in_msa_server import StandIn, msa_server

A, B = "MKVLAAGIT", "GSHMWLPEK"


def test_targets_without_alignments_are_sent_and_folded_with_what_comes_back(cli: CommandLine) -> None:
    """The same as a second run with the folder of alignments, and another fold than from the sequence alone."""
    own = cli.folder / "own.a3m"
    own.write_text(f">own\n{B}\n>x\n{B}\n")
    folder = cli.out / "alignments"
    folder.mkdir(parents=True)
    (folder / "T2.a3m").write_text(f">T2\n{B}\n>x\n{B}\n")
    inputs = [cli.fasta({"T1": A, "T2": B}), own]
    stand_in = StandIn(["PENDING"])
    stand_in.rows = 8
    with msa_server(stand_in) as server:
        done = cli.infer(*inputs, "--msa-server", server.url, "--quiet")
    assert done.code == 0, done.err
    assert [query[2] for query in stand_in.queries] == [[A]]
    assert f"--msa-server: leaving this machine for {server.url}" in done.err  # although --quiet
    assert cli.scores("T1")["plddt"] != []
    assert (folder / "T1" / "colabfold_hits.a3m").is_file()
    with_server = cli.scores("T1")["plddt"]
    inputs[0] = cli.fasta({"T1": A})
    again = cli.infer(inputs[0], "--msa-dir", folder, "--overwrite")
    assert again.code == 0, again.err
    assert cli.scores("T1")["plddt"] == with_server
    alone = cli.infer(inputs[0], "--overwrite")
    assert alone.code == 0, alone.err
    assert not np.allclose(cli.scores("T1")["plddt"], with_server)


def test_a_server_that_fails_ends_the_run_and_keeps_its_answers(cli: CommandLine) -> None:
    with msa_server(StandIn(["COMPLETE", "MAINTENANCE"])) as server:
        done = cli.infer(
            cli.fasta({"T1": A, "T2": B}), "--msa-server", server.url, "--msa-dir", cli.folder / "msas"
        )
    assert (done.code, "under maintenance" in done.err) == (1, True)
    assert (cli.folder / "msas" / "T1" / "colabfold_hits.a3m").is_file()


def test_search_asks_a_server_too(cli: CommandLine) -> None:
    stand_in = StandIn()
    with msa_server(stand_in) as server:
        done = cli.run("search", cli.fasta({"T1": f"{A}:{B}"}), "--msa-server", server.url, "--out", cli.out)
    assert done.code == 0, done.err
    assert len(stand_in.queries) == 3
    assert (cli.out / "T1" / "colabfold_hits.a3m").read_text().startswith("#9,9\t1,1\n>101\t102\n")
    with msa_server(stand_in) as other:
        done = cli.run(
            "infer", cli.fasta({"T1": A}), "--msa-only", "--msa-server", other.url, "--out", cli.out
        )
    assert done.code == 0, done.err
    assert (cli.out / "alignments" / "T1" / "colabfold_hits.a3m").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--msa-server", "colabfold"], "'colabfold' is not the address of a server"),
        (
            ["--msa-server", "http://x", "--db", "x.fasta"],
            "--db searches on this machine, --msa-server elsewhere",
        ),
        (["--msa-server", "http://x", "--engine", "phmmer"], "--engine: not for this way to search"),
        (
            ["--msa-server", "http://x", "-N", "3", "--F1", "1"],
            "--iterations, --F1: not for this way to search",
        ),
        (["--msa-server", "http://x", "--gpu"], "--gpu goes with --engine mmseqs alone"),
        (["--engine", "mmseqs", "--db", "a", "b"], "--engine mmseqs takes one folder of databases"),
        (["--engine", "mmseqs", "--db", "nowhere"], "is no folder of databases in ColabFold's layout"),
        ([], "say where to search"),
    ],
)
def test_what_cannot_be_searched_is_refused(cli: CommandLine, arguments: list[str], expected: str) -> None:
    done = cli.run("search", cli.fasta({"T1": A}), "--out", cli.out, *arguments)
    assert (done.code, expected in done.err) == (1, True), done.err


def test_what_cannot_be_asked_is_refused_before_anything_is_sent(cli: CommandLine) -> None:
    inputs = cli.fasta({"T1": A})
    done = cli.infer(inputs, "--msa-server", "colabfold")
    assert (done.code, "'colabfold' is not the address of a server" in done.err) == (1, True)
    done = cli.infer(inputs, "--msa-server", "http://x", "--db", "x.fasta")
    assert (done.code, "give one of the two" in done.err) == (1, True)


def test_a_server_is_asked_where_no_database_is_searched() -> None:
    parser = argparse.ArgumentParser()
    option.add_server_option(parser)
    assert parser.parse_args([]).msa_server is None
    options = parser.parse_args(["--msa-server", "http://127.0.0.1:9"], argparse.Namespace(db=[], quiet=True))
    assert option.server_source(options).settings["url"].startswith("http://127.0.0.1:9")
    options.db = ["uniref90.fasta"]
    with pytest.raises(ConfigError, match="--db searches on this machine, --msa-server elsewhere"):
        option.server_source(options)
