"""``fastfold search`` and ``fastfold infer --db``: what they write, say and refuse."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import fastfold
from fastfold.data.search import hmmer, store
from fastfold.errors import ConfigError, InputError
from tests.helpers.command_line import CommandLine
from tests.helpers.forked import fork_command
from tests.helpers.sequence_databases import queries, write_database
from tests.helpers.stand_in_msa_server import StandIn, msa_server

ONE_PROCESS = ("--cpu", "1", "--memory", "1GiB")


@pytest.fixture
def database(cli: CommandLine) -> Path:
    return write_database(cli.folder / "uniref90.fasta", queries())


def files(folder: Path) -> list[str]:
    """Alignments that a person sees."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob("[!.]*/**/*_hits.*"))


def test_the_help_names_databases_settings_and_the_next_command(cli: CommandLine) -> None:
    text = cli.run("search", "--help").out
    words = " ".join(text.split())
    for part in (
        "usage: fastfold search INPUT [INPUT ...] --db [NAME=]FASTA [...] --out DIR",
        "fastfold infer proteins.fasta --msa-dir alignments",
        "uniprot pairs the chains of complexes by species",
        "docs/search.md",
        "--iterations",
        "--incE",
        "--memory",
    ):
        assert part in words
    assert max(map(len, text.splitlines())) <= 120


def test_search_writes_what_msa_dir_reads(cli: CommandLine, database: Path) -> None:
    first, second = queries().values()
    fasta = cli.fasta({"T1": first, "T2": f"{first}:{second}"})
    out = cli.folder / "alignments"
    done = cli.run("search", fasta, "--db", database, f"uniprot={database}", "--out", out, *ONE_PROCESS)
    assert (done.code, done.out) == (0, f"alignments of 2 targets in {out}\n")
    names = ("uniprot_hits.sto", "uniref90_hits.sto")
    assert files(out) == [f"{place}/{name}" for place in ("T1", "T2/A", "T2/B") for name in names]
    assert "uniref90: 2 sequences searched in 0:0" in done.err
    again = cli.run("search", fasta, "--db", database, "--out", out, *ONE_PROCESS)
    assert (again.code, "uniref90: all 2 found before" in again.err) == (0, True)


def test_infer_searches_and_folds_and_next_time_does_neither(cli: CommandLine, database: Path) -> None:
    fasta = cli.fasta({"T1": queries()["q0"]})
    search = ("--db", database, f"uniprot={database}", "--cpu", "1")
    done = cli.infer(fasta, *search)
    assert done.code == 0, done.err
    assert files(cli.out / "alignments") == ["T1/uniref90_hits.sto"]  # nothing to pair
    assert "alignment rows" in done.err
    assert "sequence alone" not in done.err
    again = cli.infer(fasta, *search)
    assert "uniref90: all 1 found before" in again.err
    assert again.out.startswith("0 folded, 1 finished before")


def test_complexes_of_different_chains_get_uniprot(cli: CommandLine, database: Path) -> None:
    first, second = queries().values()
    fasta = cli.fasta({"hetero": f"{first}:{second}", "homo": f"{first}:{first}"})
    out = cli.folder / "alignments"
    done = cli.run(
        "infer",
        fasta,
        "--db",
        f"uniprot={database}",
        "--msa-only",
        "--msa-dir",
        out,
        "--out",
        cli.out,
        "--cpu",
        "1",
    )
    assert done.code == 0, done.err
    assert files(out) == ["hetero/A/uniprot_hits.sto", "hetero/B/uniprot_hits.sto"]
    assert not cli.out.exists()


def test_infer_without_an_alignment_says_so_in_a_line(cli: CommandLine) -> None:
    done = cli.infer(cli.fasta({"T1": "MKTAYIAKQR"}))
    lines = [line for line in done.err.splitlines() if "from the sequence alone. An alignment" in line]
    assert len(lines) == 1
    assert "--db" in lines[0]
    assert "--msa-dir" in lines[0]


@pytest.mark.long
def test_a_killed_search_goes_on_where_it_was(
    cli: CommandLine, database: Path, ended: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = queries(24)
    write_database(database, wanted, relatives=2)
    fasta, out = cli.fasta(wanted), cli.folder / "alignments"
    arguments = ("search", fasta, "--db", database, "--out", out, "--cpu", "2")
    process = fork_command(*arguments)
    ended.append(process)
    while not files(out) and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    before = {path.parent.parent.name for path in out.glob(f"{store.FOLDER}/*/*/uniref90-*/record.json")}
    assert before
    searched: list[str] = []
    search = hmmer.HmmerEngine.search
    monkeypatch.setattr(
        hmmer.HmmerEngine,
        "search",
        lambda self, sequences, report: searched.extend(sequences) or search(self, sequences, report),
    )
    done = cli.run(*arguments[:-1], "1")
    assert done.code == 0, done.err
    assert len(searched) == len(wanted) - len(before)
    assert before.isdisjoint(map(store.sequence_digest, searched))
    assert len(files(out)) == len(wanted)
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"hello\n", "is not FASTA"), (b">a\n" + b"ACGT" * 50, "contains nucleotides")],
)
def test_a_bad_database_is_one_error_before_anything_is_written(
    cli: CommandLine, content: bytes, message: str
) -> None:
    path = cli.folder / "db.fasta"
    path.write_bytes(content)
    done = cli.run("search", cli.fasta({"a": "MKV"}), "--db", path, "--out", cli.out)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"fastfold: {path}: {message}")
    assert not cli.out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--db", "a.fasta"], "every name after --db is a database"),
        (["{fasta}", "--db", "missing.fasta"], "missing.fasta: no such database"),
        (["{fasta}", "--db", "{db}", "x=1", "x=2"], "would both be named x"),
        (["{fasta}", "--db", "{db}", "--memory", "lots"], "is not an amount of memory"),
        (["{fasta}", "--db", "{db}", "--memory", "1MiB", "--cpu", "1"], "is too small to search"),
        (["{fasta}", "--db", "{db}", "-E", "0"], "--e-value must be more than 0"),
        (
            ["{fasta}", "--db", "{db}", "--engine", "phmmer", "-N", "2"],
            "phmmer makes one pass through a database",
        ),
    ],
)
def test_wrong_use_is_one_clear_error(
    cli: CommandLine, database: Path, arguments: list[str], message: str
) -> None:
    fasta = cli.fasta({"T1": "MKTAYIAKQR"})
    given = [argument.format(fasta=fasta, db=database) for argument in arguments]
    done = cli.run("search", *given, "--out", cli.out)
    assert done.code == (1 if "missing.fasta" in arguments else 2)
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_one_clear_error(cli: CommandLine, database: Path) -> None:
    cli.out.write_text("a file")
    done = cli.run("search", cli.fasta({"T1": "MKTAYIAKQR"}), "--db", database, "--out", cli.out)
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "it is a file, not a folder" in done.err


def test_bad_records_do_not_keep_the_others_from_being_searched(cli: CommandLine, database: Path) -> None:
    fasta = cli.fasta(f">good\n{queries()['q0']}\n>bad\nMK1V\n")
    done = cli.run("search", fasta, "--db", database, "--out", cli.out, *ONE_PROCESS)
    assert (done.code, "record 'bad'" in done.err) == (1, True)
    assert files(cli.out) == ["good/uniref90_hits.sto"]


def test_msa_only_needs_a_place_to_search(cli: CommandLine) -> None:
    done = cli.run("infer", cli.fasta({"T1": "MKV"}), "--msa-only", "--out", cli.out)
    assert (done.code, "say where to search: --db FASTA" in done.err) == (2, True)


def test_search_in_python_feeds_predict(cli: CommandLine, database: Path) -> None:
    sequence = queries()["q0"]
    folder = fastfold.search({"T1": sequence}, database, cli.folder / "found", file_format="a3m")
    assert files(folder) == ["T1/uniref90_hits.a3m"]
    model = fastfold.load_model(cli.weights(), device="cpu")
    with_rows = fastfold.predict(sequence, model, msa=folder, name="T1", num_recycles=0)
    alone = fastfold.predict(sequence, model, name="T1", num_recycles=0)
    assert abs(with_rows.mean_plddt - alone.mean_plddt) > 1e-6
    with pytest.raises(InputError, match="contains no alignment of 'T2'"):
        fastfold.predict(sequence, model, msa=folder, name="T2")
    with pytest.raises(ConfigError, match="unknown setting 'evalue'"):
        fastfold.search(sequence, database, folder, evalue=1)


def test_a_sequence_that_the_server_cannot_do_fails_its_target_alone_on_every_run(cli: CommandLine) -> None:
    records = {"good1": "MQIFVKTLTGKTITLE", "poly": "AAAAAAAAAAAALLAAA", "good2": "MTPAVTTYKLVINGKT"}
    fasta = cli.fasta(records)
    stand_in = StandIn(["COMPLETE", "ERROR", "COMPLETE", "ERROR"])
    with msa_server(stand_in) as server:
        for _ in range(2):
            done = cli.infer(fasta, "--msa-server", server.url)
            assert done.code == 1
            assert "error: record 'poly': http://" in done.err
            assert "the server failed on this query (ERROR)" in done.err
            assert list(cli.out.glob("good1_rank_001_*.pdb"))
            assert list(cli.out.glob("good2_rank_001_*.pdb"))
            assert not list(cli.out.glob("poly*"))
        assert "2 finished before, 1 failed" in done.out
        asked = [sequences for _, _, sequences in stand_in.queries]
        assert asked == [[records[name]] for name in ("good1", "poly", "good2", "poly")]
        stand_in.states = ["ERROR"]
        found = cli.run("search", fasta, "--msa-server", server.url, "--out", cli.out / "alignments")
        assert found.code == 1
        assert "error: record 'poly': http://" in found.err
        assert "alignments of 2 targets" in found.out
