"""Hits, decisions and features of templates are those that the official program recorded."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastfold.errors import InputError
from fastfold.products.verify import data
from fastfold.products.verify.data import DECISIONS, EXPECTED, RecordedArray, compare_templates
from fastfold.products.verify.records import recorded_runs, verify
from tests.conftest import require_shared

SEARCHES = ("templates_hmmsearch", "templates_hhsearch")
CASES = [
    *[("templates_hmmsearch", name) for name in ("chemokine", "pdz", "thioredoxin", "errors_chemokine")],
    *[("templates_hmmsearch", name) for name in ("errors_no_hits", "errors_thioredoxin")],
    *[("templates_hhsearch", name) for name in ("chemokine", "pdz", "thioredoxin")],
    *[("templates_hhsearch", name) for name in ("errors_no_hits", "errors_thioredoxin")],
]


@pytest.mark.parametrize(("search", "name"), CASES)
def test_recorded_templates_agree(search: str, name: str) -> None:
    """The search's alignment, the hits, what became of each, and positions; where the official program crashes, why."""
    directory = require_shared("oracles_data", search, name)
    found = list(verify(directory))
    assert [one.name for one in found if not one.passed] == []
    names = {one.name for one in found}
    with np.load(directory / EXPECTED) as file:
        recorded = set(file.files)
    assert names >= {name for name in recorded if name.startswith("hits/")}
    decisions = json.loads((directory / DECISIONS).read_text())
    for variant in ("default", "release", "noobsolete_max3"):
        assert f"{variant}/outcome" in names
        if "crash" not in decisions[variant]:
            prefix = "" if variant == "default" else f"{variant}/"
            assert names >= {name for name in recorded if name.startswith(f"{prefix}template_")}
    assert ("search" in names) == (search == "templates_hmmsearch")


def test_recorded_entries_agree() -> None:
    """Sequences, dates and atoms of 50 mmCIF files, and that two of them cannot be used."""
    directory = require_shared("oracles_data", "mmcif_parsing")
    found = list(verify(directory))
    assert [one.name for one in found if not one.passed] == []
    assert sum(one.name.endswith("/usable") for one in found) == 51
    assert sum(one.name.endswith("/mask_sum") for one in found) >= 50


def test_a_record_of_entries_needs_no_list_of_differences(tmp_path: Path) -> None:
    """One invented entry, which is not among the files: nothing is compared, nothing is missed."""
    (tmp_path / "record").mkdir()
    (tmp_path / "template_db").mkdir()
    with tarfile.open(tmp_path / "template_db" / "mmcif.tar.gz", "w:gz"):
        pass
    (tmp_path / "record" / "expected.json").write_text('{"1abc": {"errors": {"x": "y"}}}')
    np.savez(tmp_path / "record" / EXPECTED)
    assert list(verify(tmp_path / "record")) == []
    (tmp_path / "record" / "1abc.cif").write_text("data_1ABC\n")
    (one,) = verify(tmp_path / "record")
    assert (one.name, one.passed) == ("1abc/usable", True)


def test_a_folder_of_records_stands_for_all_of_them() -> None:
    for search in SEARCHES:
        directory = require_shared("oracles_data", search)
        found = recorded_runs(directory)
        assert {(search, run.name) for run in found} == {case for case in CASES if case[0] == search}
        assert recorded_runs(found[0]) == [found[0]]


@pytest.mark.parametrize(
    ("file", "old", "new", "wrong"),
    [
        ("expected_pdb_hits.hhr", "Sum_probs=68.3", "Sum_probs=1.3", {"hits/sum_probs", "default/hit"}),
        (
            "expected_pdb_hits.hhr",
            "Aligned_cols=67",
            "Aligned_cols=7",
            {"hits/aligned_cols", "default/outcome"},
        ),
        (
            "expected_decisions.json",
            '"matched_chain": "B", "mapping_offset": 3',
            '"mapping_offset": 4',
            {"mapping"},
        ),
        ("expected_decisions.json", "prefilter: LengthError", "features", {"default/outcome"}),
    ],
)
def test_a_changed_record_shows(tmp_path: Path, file: str, old: str, new: str, wrong: set[str]) -> None:
    """The comparison can fail."""
    shared = require_shared("oracles_data", "templates_hhsearch", "chemokine")
    case = tmp_path / "templates_hhsearch" / "chemokine"
    shutil.copytree(shared, case)
    (tmp_path / "template_db").symlink_to(shared.parent.parent / "template_db")
    (case / file).chmod(0o644)
    text = (case / file).read_text()
    assert old in text
    (case / file).write_text(text.replace(old, new))
    failed = [one.name for one in verify(case) if not one.passed]
    assert all(any(part in name for name in failed) for part in wrong), failed


def test_a_record_without_its_database_is_refused(tmp_path: Path) -> None:
    shared = require_shared("oracles_data", "templates_hhsearch", "chemokine")
    shutil.copytree(shared, tmp_path / "chemokine")
    with np.load(shared / EXPECTED) as file:
        arrays = compare_templates(tmp_path / "chemokine", dict(file))
        assert isinstance(next(arrays), RecordedArray)  # the hits need none
    with pytest.raises(InputError, match=r"mmcif\.tar\.gz: not a readable archive"):
        list(arrays)


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("last", ["crash", "features", "extract: NoChainsError"])
def test_decisions_are_compared_up_to_a_crash(last: str, ranked: bool) -> None:
    """The official program ends at a crash; hits of a sequence that came before are told as repeated."""
    used = SimpleNamespace(name="1abc_A", sequence="MKT", mapping={0: 5, 1: 6, 2: 9})
    decided = [(4, "used"), (2, "repeated"), (7, "other sequence"), (8, "short")]
    outcomes = [SimpleNamespace(index=index, reason=reason) for index, reason in decided]
    template = {"template_domain_name": "1abc_A", "template_sequence": "MKT"}
    rows: list[dict[str, Any]] = [
        {
            "index": 4,
            "outcome": "features",
            "mapping": [[0, 2], [1, 3], [2, 6]],
            "mapping_offset": 3,
            **template,
        },
        {
            "index": 2,
            "outcome": "features",
            "realigned_mapping": [[0, 5], [1, 6], [2, -1]],
            "mapping": [],
            **template,
        },
        {"index": 7, "outcome": last, "mapping": [], **template, "template_sequence": "MKV"},
    ]
    for number, row in enumerate(rows):
        row["repeated_template_sequence"] = number == 1
    chosen: Any = SimpleNamespace(outcomes=outcomes, templates=[used])
    hit, outcome, *mappings = data._decisions("v", chosen, rows, ranked=ranked)
    end = 3 if last == "crash" else 4
    assert (hit.name, hit.ours.tolist(), hit.theirs.tolist()) == ("v/hit", [4, 2, 7, 8][:end], [4, 2, 7])
    assert outcome.ours.tolist() == [reason.encode() for _, reason in decided[:end]]
    second = b"features" if ranked else b"repeated"
    third = b"other sequence" if last == "crash" else last.encode()
    assert outcome.theirs.tolist() == [b"used", second, third]
    assert [one.name for one in mappings] == ["v/mapping of 4", "v/mapping of 2"]
    for one in mappings:
        assert one.ours.tolist() == one.theirs.tolist() == [[0, 5], [1, 6], [2, 9]]
