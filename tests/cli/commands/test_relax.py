"""``fastfold relax``: every file is tried, failures are told apart, and nothing is lost."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from fastfold.cli.commands import relax
from fastfold.inference.relax import files, protocol
from fastfold.protein.io.pdb_writer import to_pdb
from tests.helpers.command_line import CommandLine
from tests.helpers.peptides import helix

QUICK = ("--platform", "CPU", "--threads", "1", "--max-rounds", "1")


def structure(folder: Path, name: str, *sequences: str) -> Path:
    path = folder / name
    text = to_pdb(helix(*sequences))
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_one_bad_file_does_not_keep_the_others_from_being_relaxed(cli: CommandLine) -> None:
    trace = structure(cli.folder, "trace.pdb", "AKLEW")
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join(line for line in lines if not line.startswith("ATOM") or " CA " in line))
    good = structure(cli.folder, "good.pdb.gz", "AKLEW")
    missing = cli.folder / "missing.cif"
    done = cli.run("relax", missing, trace, good, "--out", cli.out, *QUICK)
    assert done.code == 1
    assert cli.names() == ["good_relax.json", "good_relaxed.cif", "good_relaxed.pdb"]
    assert "missing.cif" in done.err
    assert f"{trace}: cannot relax a structure: 5 of 5 residues have CA alone" in done.err
    assert "Traceback" not in done.err
    assert f"{good}: relaxed: " in done.out
    assert "CPU (1 thread)" in done.out
    assert done.out.endswith("1 of 3 relaxed\n")
    assert cli.load("good_relax.json")["relaxed"] is True


def test_a_long_relaxation_says_how_far_it_is(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_SECONDS_BETWEEN_LINES", 0.0)
    good = structure(cli.folder, "good.pdb", "AKLEW")
    done = cli.run("relax", good, "--out", cli.out, *QUICK)
    assert done.code == 0
    line = r"good\.pdb: round 1 of at most 1, 12 iterations, elapsed 0:\d\d, about 0:\d\d left\n"
    assert re.search(line, done.err)


def test_results_are_not_overwritten_unasked(cli: CommandLine) -> None:
    good = structure(cli.folder, "good.pdb", "AAA")
    assert cli.run("relax", good, "--out", cli.out, *QUICK).code == 0
    before = cli.contents()
    done = cli.run("relax", good, "--out", cli.out, *QUICK)
    assert (done.code, cli.contents()) == (1, before)
    assert "use --overwrite" in done.err
    done = cli.run("relax", good, "--out", cli.out, "--overwrite", *QUICK)
    assert done.code == 0, done.err
    for name in ("good_relaxed.pdb", "good_relaxed.cif"):
        assert cli.contents()[name] == before[name]


def test_two_files_of_one_name_do_not_overwrite_each_other(cli: CommandLine) -> None:
    first = structure(cli.folder, "x.pdb", "AAA")
    second = structure(cli.folder, "x.pdb.gz", "GGG")
    done = cli.run("relax", first, second, "--out", cli.out, "--overwrite", *QUICK)
    assert done.code == 1
    assert f"{second}: another file of this run has the same name" in done.err
    assert " ALA " in (cli.out / "x_relaxed.pdb").read_text()


def test_a_structure_that_stays_bad_is_written_and_counts_as_failed(cli: CommandLine) -> None:
    lysines = structure(cli.folder, "k.pdb", "KKKKK")
    done = cli.run("relax", lysines, *QUICK, "--max-iterations", "40")
    assert done.code == 1
    assert f"{lysines}: not relaxed: the energy stays positive" in done.out
    assert "minimised but not relaxed" in (cli.folder / "k_relaxed.pdb").read_text()


def test_a_bug_in_one_file_is_reported_and_the_rest_goes_on(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTFOLD_DEBUG", raising=False)
    real = files.relax

    def relax_or_break(protein, config, **options):
        if len(protein) == 2:
            raise RuntimeError("surprise")
        return real(protein, config, **options)

    monkeypatch.setattr(files, "relax", relax_or_break)
    bad, good = structure(cli.folder, "bad.pdb", "AA"), structure(cli.folder, "good.pdb", "AAA")
    done = cli.run("relax", bad, good, "--out", cli.out, *QUICK)
    assert done.code == 1
    assert f"{bad}: internal error, RuntimeError: surprise" in done.err
    assert "good_relaxed.pdb" in cli.names()


@pytest.mark.parametrize(
    "wrong", [["--platform", "cuda"], ["--max-iterations", "0"], ["--max-rounds", "1.5"], ["--threads", "-1"]]
)
def test_wrong_use_is_told_at_once(cli: CommandLine, wrong: list[str]) -> None:
    assert cli.run("relax", "x.pdb", *wrong).code == 2


def test_the_command_adds_itself_under_its_own_name() -> None:
    assert callable(relax.add_relax_command)
