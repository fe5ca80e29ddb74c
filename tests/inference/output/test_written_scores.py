"""Files of a results folder from anywhere: read as ours, or refused by name, and within a deadline."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.score_files import read_pae, read_scores
from fastfold.inference.output.writer import draw_plot

SCORES = {
    "name": "t",
    "model": "mini",
    "seed": 0,
    "sequences": ["MKV", "GA"],
    "plddt": [90.0, 80.5, 70.0, 60.0, 55.0],
    "ptm": 0.5,
    "iptm": None,
}
PAE = [{"predicted_aligned_error": [[0.0] * 5] * 5, "max_predicted_aligned_error": 31.75}]
PIECES = ["../", "1e999", "[" * 3000, "9" * 5000, "\\ud800", "null", '"', "}", "-", "0.5", '{"a":1}', "\x00"]
DEADLINE_S = 5.0


def test_what_we_write_comes_back(tmp_path: Path) -> None:
    scores, pae = tmp_path / "a_scores.json", tmp_path / "a_pae.json"
    scores.write_text(json.dumps(SCORES))
    pae.write_text(json.dumps(PAE))
    assert read_scores(scores) == SCORES
    errors, largest = read_pae(pae, 5)
    assert errors.shape == (5, 5)
    assert largest == 31.75


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("plddt", "high", "plddt is missing or has another type"),
        ("plddt", [1.0], "plddt is not a number for each residue"),
        ("ptm", "good", "ptm is not a number"),
        ("iptm", 10**400, "iptm is not a number"),
        ("sequences", [], "sequences are not text"),
        ("model", None, "model is missing or has another type"),
    ],
)
def test_a_foreign_score_is_named_with_its_file(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a_scores.json"
    path.write_text(json.dumps(SCORES | {key: value}))
    with pytest.raises(InputError, match=message) as caught:
        read_scores(path)
    assert str(path) in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a_scores.json"
    os.mkfifo(path)
    for read in (read_scores, lambda path: read_pae(path, 5)):
        with pytest.raises(InputError, match="not a regular file"):
            read(path)


def test_aligned_errors_of_another_length_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a_pae.json"
    path.write_text(json.dumps(PAE))
    with pytest.raises(InputError, match="aligned error of 6 residues"):
        read_pae(path, 6)


def _mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(PIECES) + text[at + rng.choice((0, 1, 1, 5, 40)) :]
    return text


def _refused(number: int, folder: Path) -> int:
    """Read mutated scores, errors and records; return how many were refused."""
    rng, refused = random.Random(1), 0
    results = ResultsFolder(folder).target(target_from_sequence("MKVGA", "t"))
    files = {"_scores.json": json.dumps(SCORES), "_pae.json": json.dumps(PAE)}
    record = results.add("0" * 64, "mini_seed_0", files, {"plddt": 70.0}, lambda all_of_them: [0.0])
    place = results.state / f"{record.id}.json"
    originals = {
        place: place.read_text(),
        **{results.path(record, end): text for end, text in files.items()},
    }
    for turn in range(number):
        path = list(originals)[turn % len(originals)]
        path.write_text(_mutated(originals[path], rng), encoding="utf-8")
        start = time.monotonic()
        try:
            if path == place:
                refused += results.find(record.id) is None
            else:
                scores = read_scores(results.path(record, "_scores.json"))
                read_pae(results.path(record, "_pae.json"), len(scores["plddt"]))
        except InputError:
            refused += 1
        assert time.monotonic() - start < DEADLINE_S
        path.write_text(originals[path])
    assert draw_plot(results, record).startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    return refused


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    assert 100 < _refused(300, tmp_path / "out") < 300


@pytest.mark.slow
def test_ten_thousand_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    assert 5000 < _refused(10_000, tmp_path / "out") < 10_000
