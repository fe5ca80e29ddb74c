"""Something that stands where a target's or the run's files belong fails that target or table alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import fastfold
from fastfold.errors import PlaceError, WriteError
from fastfold.inference.output import results_folder
from fastfold.inference.output.summary import read_table
from fastfold.inference.output.used_methods import used_methods
from fastfold.inference.report.discover import find_predictions
from fastfold.utils.atomic_files import output_error
from tests.helpers.command_line import CommandLine, Outcome
from tests.inference.runner.inputs import OTHER, SEQUENCE, a3m

SCREEN = pytest.param("screen", marks=pytest.mark.slow)


def fold(cli: CommandLine, command: str) -> Outcome:
    """Fold two targets into the output folder."""
    fasta = cli.fasta({"T1": SEQUENCE, "T2": OTHER})
    if command == "infer":
        return cli.infer(fasta)
    workers = ("--workers", "1", "--weights", cli.weights(), "--num-recycles", "0", "--no-plots")
    return cli.run("screen", fasta, *workers, "--out", cli.out)


@pytest.mark.parametrize("command", ["infer", SCREEN])
def test_a_file_at_the_place_of_a_targets_records_fails_it_alone(cli: CommandLine, command: str) -> None:
    (cli.out / ".fastfold").mkdir(parents=True)
    (cli.out / ".fastfold" / "t1").write_text("")
    done = fold(cli, command)
    assert done.code == 1
    assert done.out == f"1 folded, 1 failed; open {cli.out / 'report.html'}\n"
    assert (
        f"cannot use output folder '{cli.out / '.fastfold' / 't1'}': it is a file, not a folder" in done.err
    )
    assert {name.split("_")[0] for name in cli.names() if "rank" in name} == {"T2"}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("infer", "summary.tsv"),
        ("infer", "report.html"),
        *(
            pytest.param("screen", n, marks=pytest.mark.slow)
            for n in ("summary.tsv", "failures.tsv", "report.html")
        ),
    ],
)
def test_a_folder_at_the_place_of_a_table_is_reported_at_the_end(
    cli: CommandLine, command: str, name: str
) -> None:
    (cli.out / name).mkdir(parents=True)
    done = fold(cli, command)
    assert done.code == 1
    where = f"results in {cli.out}" if name == "report.html" else f"open {cli.out / 'report.html'}"
    assert done.out == f"2 folded, 1 failed; {where}\n"
    assert done.err.count(f"'{cli.out / name}': a folder has the file's name; remove it") == 1
    assert {file.split("_")[0] for file in cli.names() if "rank" in file} == {"T1", "T2"}
    assert "bug" not in done.err


@pytest.fixture(scope="module")
def one_folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of one target, once there has been one."""
    return tmp_path_factory.mktemp("finished") / "out"


@pytest.mark.parametrize("value", ["high", [1], True, int("9" * 401)], ids=["text", "list", "true", "huge"])
@pytest.mark.parametrize("score", ["plddt", "iptm"])
def test_a_record_with_a_damaged_score_is_named(
    cli: CommandLine, one_folded: Path, score: str, value: Any
) -> None:
    if not one_folded.exists():
        assert cli.infer(cli.fasta({"T1": SEQUENCE})).code == 0
        cli.out.rename(one_folded)
    shutil.copytree(one_folded, cli.out)
    (record,) = (path for path in (cli.out / ".fastfold" / "t1").glob("*.json") if path.name != "target.json")
    content = json.loads(record.read_text())
    content["scores"][score] = value
    record.write_text(json.dumps(content))
    done = fold(cli, "infer")
    assert (done.code, done.out) == (1, f"1 folded, 1 failed; open {cli.out / 'report.html'}\n")
    assert f"{record}: expected a number as {score} of a prediction's record, found " in done.err
    assert "bug" not in done.err


def test_a_folder_of_records_without_permission_fails_its_target_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = results_folder.ResultsFolder(tmp_path)
    closed = folder.state / "t1"

    def refuse(path: Path) -> Path:
        raise output_error(path, "use output folder", denied) from denied

    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(results_folder, "prepare_output_directory", refuse)
    with pytest.raises(PlaceError, match="permission denied"):
        results_folder._prepare_records(closed)
    denied = OSError(errno.EROFS, os.strerror(errno.EROFS))  # type: ignore[assignment]
    with pytest.raises(WriteError) as found:
        results_folder._prepare_records(closed)
    assert type(found.value) is WriteError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_ends_the_run(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(path: Path, data: object) -> None:
        raise output_error(path, "write", OSError(number, os.strerror(number)))

    monkeypatch.setattr(results_folder, "write_atomic", full)
    done = fold(cli, "infer")
    assert done.code == 1
    assert "The run ends here; finished results are kept, not finished: T1, T2" in done.err


def test_each_target_has_a_folder_on_request(cli: CommandLine) -> None:
    """The page, the tables, later runs and Python find the files there."""
    fasta, weights = cli.fasta({"one": SEQUENCE, "two": OTHER}), [cli.weights()]
    (cli.folder / "msas").mkdir()
    (cli.folder / "msas" / "one.a3m").write_text(a3m(SEQUENCE, rows=3))
    arguments = (fasta, "--msa-dir", cli.folder / "msas", "--folder-per-target", "--zip")
    done = cli.infer(*arguments, weights=weights)
    assert done.code == 0, done.err
    assert f"in {cli.out / 'one'}" in done.err
    assert cli.names() == ["one", "one.result.zip", "two", "two.result.zip"]
    inside = {path.name for path in (cli.out / "one").iterdir()}
    assert {"one_coverage.json", "one_rank_001_model_1_ptm_seed_0.cif"} <= inside
    assert all(name.startswith("one_") for name in inside)
    assert len(read_table(cli.out / "summary.tsv")) == 2
    found = {one.target: one for one in find_predictions(cli.out)}
    assert set(found) == {"one", "two"}
    assert found["one"].files["_coverage.json"] == cli.out / "one" / "one_coverage.json"
    assert fastfold.Prediction.load(cli.out, "two").sequences == (OTHER,)
    assert used_methods(cli.out) == {"alphafold"}
    again = cli.infer(*arguments, weights=weights)
    assert again.out.startswith("0 folded, 2 finished before")
    (cli.folder / "known").mkdir()
    shutil.copy(found["one"].files[".cif"], cli.folder / "known" / "one.cif")
    more = cli.infer(*arguments, "--seed", "1", "--reference", cli.folder / "known", weights=weights)
    assert more.out.startswith("2 folded"), more.err
    assert {path.name for path in (cli.out / "two").glob("*.cif")} == {
        f"two_rank_00{rank}_model_1_ptm_seed_{seed}.cif"
        for rank, seed in enumerate(
            (line["seed"] for line in read_table(cli.out / "summary.tsv") if line["target"] == "two"), 1
        )
    }
    assert (cli.out / "one" / "one_reference.json").is_file()
    other = cli.infer(fasta, weights=weights)
    assert other.code == 1
    assert (
        "results with a folder per target; give another --out, or run with --folder-per-target" in other.err
    )
    wrong = cli.infer(fasta, "--folder-per-target", "--output-format", "colabfold", weights=weights)
    assert (wrong.code, "exclude each other" in wrong.err) == (2, True)
