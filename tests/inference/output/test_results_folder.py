"""A results folder only grows: own files per prediction, ranks by renaming, and any process may die at any time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import WriteError
from fastfold.inference.output.results_folder import STATE, PredictionRecord, ResultsFolder, TargetResults
from fastfold.inference.output.summary import read_table
from tests.conftest import REPOSITORY

TARGET = target_from_sequence("MKTAYIAKQR", "t")
FILES = {".pdb": "atoms", "_scores.json": "{}"}


def by_plddt(scores: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(one["plddt"]) for one in scores]


def add(results: TargetResults, number: int, plddt: float, files: Mapping[str, str] | None = None) -> None:
    """A prediction whose files say which one they are of."""
    content = {end: f"{text} {number}" for end, text in (files or FILES).items()}
    results.add(f"{number:064x}", f"model_seed_{number}", content, {"plddt": plddt}, by_plddt)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != STATE)


def ranks(folder: Path) -> dict[int, str]:
    """Text of the structures by rank."""
    return {int(path.name[7:10]): path.read_text() for path in folder.glob("t_rank_*.pdb")}


@pytest.fixture
def results(tmp_path: Path) -> TargetResults:
    return ResultsFolder(tmp_path / "out").target(TARGET)


def test_predictions_add_up_and_are_ranked_together(results: TargetResults):
    folder = results.parent.path
    add(results, 0, 50.0)
    add(results, 1, 70.0)
    add(results, 2, 60.0)
    assert ranks(folder) == {1: "atoms 1", 2: "atoms 2", 3: "atoms 0"}
    assert names(folder) == sorted(
        f"t_rank_{rank:03d}_model_seed_{seed}{end}"
        for rank, seed in ((1, 1), (2, 2), (3, 0))
        for end in FILES
    )
    assert [record.rank for record in results.records()] == [1, 2, 3]
    for record in results.records():
        assert results.find(record.id) == record


def test_a_prediction_whose_name_is_taken_gets_another_and_nothing_is_overwritten(results: TargetResults):
    add(results, 0, 50.0)
    results.add("ab" * 32, "model_seed_0", {".pdb": "other settings"}, {"plddt": 40.0}, by_plddt)
    assert ranks(results.parent.path) == {1: "atoms 0", 2: "other settings"}
    assert "t_rank_002_model_seed_0_abababab.pdb" in names(results.parent.path)
    foreign = results.parent.path / "t_rank_001_model_seed_7.pdb"
    foreign.write_text("of another program")
    results.add("cd" * 32, "model_seed_7", {".pdb": "new"}, {"plddt": 90.0}, by_plddt)
    assert foreign.read_text() == "of another program"
    assert (results.parent.path / "t_rank_001_model_seed_7_cdcdcdcd.pdb").read_text() == "new"


def test_files_can_be_added_to_a_prediction_and_the_others_stay(results: TargetResults):
    add(results, 0, 50.0)
    add(results, 1, 70.0)
    results.add(f"{0:064x}", "ignored", {".png": "picture"}, {"plddt": 50.0}, by_plddt)
    found = results.find(f"{0:064x}")
    assert found is not None
    assert set(found.files) == {*FILES, ".png"}
    assert (results.parent.path / "t_rank_002_model_seed_0.png").read_text() == "picture"


@pytest.mark.parametrize("harm", ["removed", "changed", "shortened"])
def test_a_prediction_with_a_damaged_file_is_not_finished_and_can_be_made_again(
    results: TargetResults, harm: str
):
    add(results, 0, 50.0)
    path = results.parent.path / "t_rank_001_model_seed_0.pdb"
    if harm == "removed":
        path.unlink()
    else:
        path.write_text("atoms X" if harm == "changed" else "a")
    assert results.find(f"{0:064x}") is None
    add(results, 0, 50.0)
    assert results.find(f"{0:064x}") is not None
    assert ranks(results.parent.path) == {1: "atoms 0"}


def test_a_stem_belongs_to_one_record_and_sequence(tmp_path: Path):
    said: list[str] = []

    def stem(record: str, sequence: str) -> str:
        target = replace(target_from_sequence(sequence, "a_b"), record=record)
        return ResultsFolder(tmp_path, said.append).target(target).stem

    assert stem("a_b", "MKT") == "a_b"
    assert not said
    others = [stem("a/b", "MKT"), stem("a_b", "MKTT"), stem("A_B", "MKT")]
    assert len({*others, "a_b"}) == 4
    assert len(said) == 3
    assert all("a_b: " in line and str(tmp_path) in line for line in said)
    assert [stem("a_b", "MKT"), stem("a/b", "MKT"), stem("a_b", "MKTT"), stem("A_B", "MKT")] == [
        "a_b",
        *others,
    ]
    owners = [json.loads(path.read_text()) for path in (tmp_path / STATE).glob("*/target.json")]
    assert sorted(owner["stem"] for owner in owners) == sorted(["a_b", *others])


def test_a_name_is_released_for_another_sequence(tmp_path: Path):
    """Results of the target itself, or under another name, are not those of others."""
    folder = ResultsFolder(tmp_path)
    first, second = target_from_sequence("MKV", "t"), target_from_sequence("MKVW", "t")
    assert folder.other_results(first) is None
    add(folder.target(first), 0, 50.0)
    assert folder.other_results(first) is None
    assert folder.other_results(target_from_sequence("MKVW", "u")) is None
    others = folder.other_results(second)
    assert others is not None
    others.release()
    assert names(tmp_path) == []
    own = folder.target(second)
    assert (own.stem, own.records()) == ("t", [])
    assert folder.other_results(second) is None


def test_stems_that_differ_in_case_alone_are_kept_apart(tmp_path: Path):
    folder = ResultsFolder(tmp_path)
    lower, upper = (folder.target(target_from_sequence("MKT", name)).stem for name in ("one", "ONE"))
    assert lower.casefold() != upper.casefold()


def test_removing_takes_the_files_of_those_predictions_alone(results: TargetResults):
    for number in range(3):
        add(results, number, 50.0 + number)
    (results.parent.path / "t_notes.txt").write_text("mine")
    results.remove([f"{2:064x}"])
    results.rank(by_plddt)
    assert ranks(results.parent.path) == {1: "atoms 1", 2: "atoms 0"}
    assert "t_notes.txt" in names(results.parent.path)


class Killed(BaseException):
    """Stands for the end of a process."""


def test_a_process_may_die_at_any_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stops at each operation on files in turn; whoever comes next finds all that was there before, and can go on."""
    results = ResultsFolder(tmp_path / "before").target(TARGET)
    add(results, 0, 50.0)
    add(results, 1, 40.0)
    for operation in range(1, 200):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(operation))
        results = ResultsFolder(folder).target(TARGET)
        calls = 0

        def counted(original: Any, *, stop: int = operation) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls >= stop:  # a process that is gone does nothing more
                    raise Killed
                return original(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "open", "mkdir", "rmdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                add(results, 2, 60.0)  # changes every rank
                finished = True
            except Killed:
                finished = False
        later = ResultsFolder(folder).target(TARGET)
        later.rank(by_plddt)
        kept = {f"{n:064x}" for n in (0, 1)}
        assert kept <= {record.id for record in later.records() if later.find(record.id)}
        if finished:
            assert calls < operation
        add(later, 2, 60.0)
        assert ranks(folder) == {1: "atoms 2", 2: "atoms 0", 3: "atoms 1"}
        assert names(folder) == sorted(
            f"t_rank_{rank:03d}_model_seed_{n}{end}" for rank, n in ((1, 2), (2, 0), (3, 1)) for end in FILES
        )
        assert all(later.find(record.id) for record in later.records())
        if finished:
            break
    assert finished
    assert operation > 20


def test_a_full_disk_changes_nothing(results: TargetResults, monkeypatch: pytest.MonkeyPatch):
    add(results, 0, 50.0)
    before = {path: path.read_bytes() for path in results.parent.path.rglob("*") if path.is_file()}

    def full(self: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(WriteError, match="the disk is full"):
            add(results, 1, 70.0)
    assert {path: path.read_bytes() for path in results.parent.path.rglob("*") if path.is_file()} == before


def command(code: str, folder: Path) -> list[str]:
    """Code for another process, which has ``results`` and ``add(number, plddt)``."""
    header = f"""
from fastfold.data.targets import target_from_sequence
from fastfold.inference.output.results_folder import ResultsFolder
results = ResultsFolder({str(folder)!r}).target(target_from_sequence("MKTAYIAKQR", "t"))
def by_plddt(scores): return [one["plddt"] for one in scores]
def add(n, plddt):
    results.add(f"{{n:064x}}", f"model_seed_{{n}}", {{".pdb": f"atoms {{n}}"}}, {{"plddt": plddt}}, by_plddt)
"""
    return [sys.executable, "-c", header + code]


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(code, folder), cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)


def test_two_processes_in_one_folder_neither_lose_nor_overwrite(tmp_path: Path):
    code = "for n in range({}, 12, 2): add(n, 50.0 + 7 * n % 20)"
    processes = [start(code.format(first), tmp_path) for first in (0, 1)]
    assert [process.wait() for process in processes] == [0, 0]
    results = ResultsFolder(tmp_path).target(TARGET)
    assert sorted(record.id for record in results.records()) == [f"{n:064x}" for n in range(12)]
    expected = sorted(range(12), key=lambda n: (-(50.0 + 7 * n % 20), f"model_seed_{n}"))
    assert ranks(tmp_path) == {rank: f"atoms {n}" for rank, n in enumerate(expected, 1)}


def test_a_prediction_is_made_by_one_process_at_a_time(tmp_path: Path):
    code = """
with results.claimed("1" * 64) as mine:
    print(mine, flush=True)
    input()
"""
    with start(code, tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        results = ResultsFolder(tmp_path).target(TARGET)
        with results.claimed("1" * 64) as mine:
            assert not mine
        with results.claimed("2" * 64) as mine:
            assert mine
        holder.kill()
        holder.wait()
        with results.claimed("1" * 64) as mine:
            assert mine
    assert not list(results.state.glob("*.lock"))


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path: Path):
    code = """
import os
import random
from fastfold.utils.atomic_files import temporary_name
for folder in (results.parent.path, results.parent.state, results.state):
    (folder / temporary_name()).mkdir()
    (folder / temporary_name()).write_text("half a file")
    print(os.listdir(folder), flush=True)
input()
"""
    with start(code, tmp_path) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        ResultsFolder(tmp_path).target(TARGET)
        assert len(list(tmp_path.rglob(".fastfold-*.tmp"))) >= 6
        process.kill()
        process.wait()
    ResultsFolder(tmp_path).target(TARGET)
    assert not [path for path in tmp_path.rglob(".fastfold-*.tmp") if f"-{process.pid}-" in path.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"schema_version": 2}',
        '{"schema_version": 2, "id": "../x", "key": "k", "files": {}, "scores": {}, "rank": 1}',
        '{"schema_version": 2, "id": "x", "key": "a/b", "files": {}, "scores": {}, "rank": 1}',
        '{"schema_version": 2, "id": "x", "key": "k", "files": {"/../e": [1, ""]}, "scores": {}, "rank": 1}',
        '{"schema_version": 2, "id": "x", "key": "k", "files": {".pdb": [1]}, "scores": {}, "rank": 1}',
        '{"schema_version": 2, "id": "x", "key": "k", "files": {}, "scores": {}, "rank": true}',
    ],
)
def test_a_record_that_is_not_ours_counts_as_none(results: TargetResults, text: str):
    add(results, 0, 50.0)
    (results.state / "x.json").write_text(text)
    assert [record.key for record in results.rank(by_plddt)] == ["model_seed_0"]


def test_a_damaged_owner_is_not_taken_for_anybody(tmp_path: Path):
    folder = ResultsFolder(tmp_path)
    add(folder.target(TARGET), 0, 50.0)
    (tmp_path / STATE / "t" / "target.json").write_text("{")
    assert folder.target(TARGET).stem != "t"
    assert json.loads((tmp_path / STATE / "t" / f"{0:064x}.json").read_text())["rank"] == 1


def test_a_target_is_known_by_all_of_its_chains(tmp_path: Path):
    folder = ResultsFolder(tmp_path)
    first: Target = target_from_sequence("MKT:MKT", "c")
    second: Target = target_from_sequence("MKTMKT", "c")
    assert folder.target(first).stem == "c"
    assert folder.target(second).stem != "c"


@pytest.mark.parametrize("stem", ["../victim", "/tmp/victim", "other", "", ".", 7, None])
def test_a_foreign_stem_never_becomes_a_path(tmp_path: Path, stem: object):
    folder = ResultsFolder(tmp_path / "out")
    results = folder.target(TARGET)
    add(results, 0, 50.0)
    owner = json.loads((results.state / "target.json").read_text())
    (results.state / "target.json").write_text(json.dumps(owner | {"stem": stem}))
    found = folder.target(TARGET)
    assert found.stem != TARGET.name
    assert found.stem.startswith("t_")
    add(found, 1, 50.0)
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("place", [STATE, f"{STATE}/t"])
def test_a_link_in_place_of_the_records_is_not_followed(tmp_path: Path, place: str):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "out" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with contextlib.suppress(WriteError):
        add(ResultsFolder(tmp_path / "out").target(TARGET), 0, 50.0)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_pipes_in_place_of_files_are_not_waited_for(results: TargetResults):
    add(results, 0, 50.0)
    structure = results.path(results.records()[0], ".pdb")
    for path in (structure, results.state / f"{1:064x}.json"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert results.find(f"{0:064x}") is None
    assert [record.key for record in results.records()] == ["model_seed_0"]
    table = results.parent.path / "summary.tsv"
    os.mkfifo(table)
    assert read_table(table) == []


def _unusable(number: int, tmp_path: Path) -> int:
    """Open results with mutated records of targets; return how many were not taken."""
    rng, unusable = random.Random(0), 0
    place = tmp_path / "out" / STATE / "t" / "target.json"
    ResultsFolder(tmp_path / "out").target(TARGET)
    good = place.read_text()
    pieces = ["../", "/", "1e999", "[" * 2000, "9" * 5000, "\\ud800", "null", '"', "}", "x"]
    for _ in range(number):
        text = good
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(pieces) + text[at + rng.choice((0, 1, 1, 5)) :]
        place.write_text(text)
        begin = time.monotonic()
        results = ResultsFolder(tmp_path / "out").target(TARGET)
        assert time.monotonic() - begin < 5
        unusable += results.stem != "t"
        assert results.path(PredictionRecord("0", "k", {}, {}), ".pdb").parent == tmp_path / "out"
    assert names(tmp_path) == ["out"]
    return unusable


def test_mutated_records_of_targets_stay_inside(tmp_path: Path):
    assert 50 < _unusable(200, tmp_path) <= 200


@pytest.mark.slow
def test_ten_thousand_mutated_records_of_targets_stay_inside(tmp_path: Path):
    assert 1000 < _unusable(10_000, tmp_path) <= 10_000
