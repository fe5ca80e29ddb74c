"""Alignments from a server or MMseqs2; nothing is sent that was not to be sent."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.search.colabfold import msa_server as msa_server_client
from fastfold.data.search.colabfold.msa_server import MsaServer
from fastfold.data.search.hmmer import HmmerEngine
from fastfold.data.search.settings import PUBLIC_SERVER, HmmerSettings, SearchSources, ServerAccess
from fastfold.errors import ConfigError
from fastfold.inference.alignment_search import Engines, alignment_engines
from fastfold.inference.request import RunOptions
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from tests.helpers.command_line import QUICK, CommandLine
from tests.helpers.stand_in_msa_server import StandIn, msa_server

A, B = "MKVLAAGIT", "GSHMWLPEK"


def test_targets_without_alignments_are_sent_and_folded_with_what_comes_back(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as a second run with the folder of alignments, and another fold than from the sequence alone."""
    monkeypatch.setattr(msa_server_client, "_FIRST_WAIT_S", 0.01)
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
        (
            ["--msa-server", "colabfold"],
            "--msa-server: expected the address of a server that begins with https://, found 'colabfold'",
        ),
        (
            ["--msa-server", "http://x", "--db", "x.fasta"],
            "--db searches on this machine, --msa-server on another",
        ),
        (["--msa-server", "http://x", "--engine", "phmmer"], "--engine: not for --msa-server"),
        (
            ["--msa-server", "http://x", "-N", "3", "--F1", "1"],
            "--iterations, --F1: not for --msa-server",
        ),
        (["--msa-server", "http://x", "--gpu"], "--gpu needs --engine mmseqs"),
        (["--engine", "mmseqs", "--db", "a", "b"], "--engine mmseqs takes one folder of databases"),
        (["--engine", "mmseqs", "--db", "nowhere"], "not a folder of databases in ColabFold's layout"),
        ([], "say where to search"),
    ],
)
def test_what_cannot_be_searched_is_refused(cli: CommandLine, arguments: list[str], expected: str) -> None:
    done = cli.run("search", cli.fasta({"T1": A}), "--out", cli.out, *arguments)
    assert (done.code, expected in done.err) == (2, True), done.err


def test_what_cannot_be_asked_is_refused_before_anything_is_sent(cli: CommandLine) -> None:
    inputs = cli.fasta({"T1": A})
    done = cli.infer(inputs, "--msa-server", "colabfold")
    assert (
        done.code,
        "--msa-server: expected the address of a server that begins with https://, found 'colabfold'"
        in done.err,
    ) == (2, True)
    done = cli.infer(inputs, "--msa-server", "http://x", "--db", "x.fasta")
    assert (done.code, "give one of the two" in done.err) == (2, True)


def test_a_chain_with_an_alignment_keeps_it_in_this_run_and_in_later_ones(cli: CommandLine) -> None:
    """The record tells the files of each chain; the alignment of the user is used and named, and not changed."""
    msas = cli.folder / "msas"
    msas.mkdir()
    mine = msas / "dimer_A.a3m"
    mine.write_text(f">q\n{A}\n>r1\n{A[:-1]}-\n>r2\n-{A[1:]}\n")
    content, stand_in, fasta = mine.read_bytes(), StandIn(), cli.fasta({"dimer": f"{A}:{B}"})
    fold = ("--weights", cli.weights("model_1_multimer"), "--msa-dir", msas, *QUICK)
    found = []
    with msa_server(stand_in) as server:
        runs = (("--msa-server", server.url), (), ("--msa-server", server.url, "--overwrite"))
        for number, flags in enumerate(runs):
            done = cli.run("infer", fasta, *fold, *flags, "--out", cli.out / str(number % 2))
            assert done.code == 0, done.err
            line = f"dimer: chain A uses {mine}; searching chain B, pairing all chains"
            assert (line in done.err) == bool(flags)
            (path,) = (cli.out / str(number % 2)).glob("*_config.json")
            record = json.loads(path.read_text())
            found.append((record["alignment_rows"], record["alignment_files"], record["input_hash"]))
    assert found[0] == found[1] == found[2]
    assert found[0][:2] == (
        [[3, 3], [8, 3]],
        {
            "A": ["dimer_A.a3m", "dimer/colabfold_pairs.a3m"],
            "B": ["dimer/B/colabfold_hits.a3m", "dimer/colabfold_pairs.a3m"],
        },
    )
    assert [query[0::2] for query in stand_in.queries] == [("msa", [B]), ("pair", [A, B])]
    assert mine.read_bytes() == content


def test_search_leaves_chains_with_an_alignment_out(cli: CommandLine) -> None:
    cli.out.mkdir()
    (cli.out / "T1_B.a3m").write_text(f">q\n{B}\n")
    (cli.out / "T2.a3m").write_text("")
    stand_in, fasta = StandIn(), cli.fasta({"T1": f"{A}:{B}", "T2": A})
    with msa_server(stand_in) as server:
        arguments = ("search", fasta, "--msa-server", server.url, "--out", cli.out, "--pair-mode", "unpaired")
        done = cli.run(*arguments)
    assert [query[2] for query in stand_in.queries] == [[A]]
    assert f"T1: chain B uses {cli.out / 'T1_B.a3m'}; searching chain A\n" in done.err
    assert (done.code, f"error: T2: {cli.out / 'T2.a3m'}: the alignment is empty" in done.err) == (1, True)
    assert done.out == f"alignments of 1 target in {cli.out}\n"


@pytest.mark.parametrize("source", ["--msa-server", "--db"])
def test_single_sequence_mode_reads_no_alignment(cli: CommandLine, source: str) -> None:
    folder = cli.out / "alignments"
    folder.mkdir(parents=True)
    (folder / "T1.a3m").write_text(f">q\n{A}\n>r\n{A}\n")
    fasta = cli.fasta({"T1": A})
    if source == "--db":
        done = cli.infer(fasta, "--msa-mode", "single_sequence", "--db", "x.fasta")
        assert (done.code, "leave out --db" in done.err) == (2, True)
        return
    with msa_server(StandIn()) as server:
        done = cli.infer(fasta, "--msa-mode", "single_sequence", "--msa-server", server.url)
    assert done.code == 0, done.err
    assert server.requests == []
    assert cli.config("T1")["alignment_rows"] == [[0, 0]]


@pytest.mark.slow
def test_a_screen_asks_a_server_before_it_folds(cli: CommandLine) -> None:
    stand_in = StandIn()
    with msa_server(stand_in) as server:
        done = cli.run(
            "screen",
            *(cli.fasta({"T1": A, "T2": B, "T3": A}), "--msa-server", server.url),
            *(*QUICK, "--weights", cli.weights(), "--out", cli.out),
        )
    assert done.code == 0, done.err
    assert "3 folded" in done.out
    assert [query[2] for query in stand_in.queries] == [[A], [B]]
    assert (cli.out / "alignments" / "T3" / "colabfold_hits.a3m").is_file()


def test_modes_of_colabfold_are_known_by_its_names(cli: CommandLine) -> None:
    stand_in = StandIn()
    with msa_server(stand_in) as server:
        done = cli.run(
            *("search", cli.fasta({"T1": f"{A}:{B}"}), "--msa-server", server.url, "--out", cli.out),
            *("--msa-mode", "mmseqs2_uniref", "--pair-strategy", "complete"),
        )
        assert done.code == 0, done.err
        assert [query[1] for query in stand_in.queries] == ["all", "all", "paircomplete"]
        asked = len(server.requests)
        done = cli.infer(
            cli.fasta({"T1": A}), "--msa-server", server.url, "--msa-mode", "single_sequence", "--quiet"
        )
        assert (done.code, len(server.requests)) == (0, asked), done.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--msa-mode", "mmseqs2_uniref"],
            "--msa-mode mmseqs2_uniref needs --msa-server URL, or --engine mmseqs",
        ),
        (["--pair-strategy", "complete"], "https://api.colabfold.com asks ColabFold's public server"),
        (["--templates"], "--templates without files fetches the template hits of an MSA server"),
        (
            ["--msa-mode", "single_sequence", "--db", "x", "--templates"],
            "uses no alignment and asks no server; leave out --db, --templates without files",
        ),
    ],
)
def test_modes_without_a_server_are_refused(cli: CommandLine, arguments: list[str], expected: str) -> None:
    done = cli.infer(cli.fasta({"T1": A}), *arguments)
    assert (done.code, expected in done.err) == (2, True), done.err


def test_a_fasta_file_after_templates_is_an_input(cli: CommandLine) -> None:
    with msa_server(StandIn()) as server:
        done = cli.infer("--msa-server", server.url, "--msa-only", "--templates", cli.fasta({"T1": A}))
    assert (done.code, done.out) == (0, f"alignments of 1 target in {cli.out}/alignments\n"), done.err


@pytest.mark.parametrize(
    ("arguments", "environment", "header", "value"),
    [
        (
            ["--msa-server-username", "me", "--msa-server-password", "pass"],
            {},
            "Authorization",
            "Basic bWU6cGFzcw==",
        ),
        (
            ["--msa_server_username", "me"],
            {"FASTFOLD_MSA_PASSWORD": "pass"},
            "Authorization",
            "Basic bWU6cGFzcw==",
        ),
        (["--api_key_value", "k1"], {}, "X-Api-Key", "k1"),
        (["--api-key-header", "Token"], {"FASTFOLD_MSA_API_KEY": "k2"}, "Token", "k2"),
    ],
)
def test_a_private_server_gets_credentials(
    cli: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environment: dict[str, str],
    header: str,
    value: str,
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with msa_server(StandIn()) as server:
        done = cli.run(
            "search", cli.fasta({"T1": A}), "--msa-server", server.url, "--out", cli.out, *arguments
        )
    assert done.code == 0, done.err
    assert {request.headers.get(header) for request in server.requests} == {value}
    assert "sent unencrypted" in done.err
    assert value not in (cli.out / "T1" / "search.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--msa-server-username", "me"], "needs a password: set FASTFOLD_MSA_PASSWORD"),
        (["--msa-server-password", "x"], "needs ServerAccess.username=NAME"),
        (["--api-key-header", "X"], "needs a key: set FASTFOLD_MSA_API_KEY"),
        (
            ["--msa-server-username", "me", "--msa-server-password", "x", "--api-key-value", "k"],
            "give one of the two",
        ),
        (["--api-key-value", "a\nb"], "a character that no header can hold"),
        (["--api-key-value", "k", "--api-key-header", "a b"], "expected letters, digits and hyphens"),
    ],
)
def test_incomplete_credentials_are_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        _engines("--msa-server", "https://example.org", *arguments)


def test_the_public_server_gets_no_key_of_a_private_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTFOLD_MSA_API_KEY", "secret")
    for url, secrets in ((PUBLIC_SERVER, {}), ("https://example.org", {"X-API-Key": "secret"})):
        assert ServerAccess().headers(url) == secrets


def test_credentials_are_not_shown() -> None:
    shown = repr(ServerAccess("me", "a password", "a key"))
    assert ("me" in shown, "a password" in shown, "a key" in shown) == (True, False, False)


def _engines(*arguments: str) -> Engines:
    parser = argparse.ArgumentParser()
    add_field_options({"sources": parser, "search processes": parser}, SearchSources, ServerAccess)
    sources = from_options(SearchSources, parser.parse_args(arguments))
    return alignment_engines(RunOptions(sources=sources, quiet=True))


def test_nothing_is_searched_by_itself() -> None:
    assert _engines() == ()


def test_a_server_is_asked_where_no_database_is_searched() -> None:
    engines = _engines("--msa-server", "http://127.0.0.1:9")
    assert isinstance(engines, MsaServer)
    assert engines.settings["url"].startswith("http://127.0.0.1:9")
    with pytest.raises(
        ConfigError,
        match=r"SearchSources\.databases searches on this machine, SearchSources\.server on another",
    ):
        _engines("--msa-server", "http://127.0.0.1:9", "--db", "uniref90.fasta")


def test_the_engine_and_the_processes_are_those_that_were_asked_for(tmp_path: Path) -> None:
    database = tmp_path / "uniref90.fasta"
    database.write_text(f">1\n{A}\n")
    engines = _engines("--db", str(database), "--engine", "phmmer", "--cpu", "3")
    assert isinstance(engines, list)
    (engine,) = engines
    assert isinstance(engine, HmmerEngine)
    assert (engine.settings, engine.num_workers) == (HmmerSettings(engine="phmmer"), 3)
