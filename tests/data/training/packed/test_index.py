"""A set is scanned once: again if what it is made of has changed, and never because of a broken index."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from fastfold.data.training.entry import Entry
from fastfold.data.training.packed import samples as packed_index
from fastfold.data.training.packed.records import EntryList, Scanned
from fastfold.data.training.packed.samples import indexed, scanner_version

ENTRY = Entry("a", Path("a.pdb"), "MKV")


class Scan:
    """Counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Scanned:
        self.calls += 1
        return Scanned({"train": [ENTRY] * self.calls, "valid": []}, {"taken": {"length": 3}})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "index.tsv").write_text("name")
    return tmp_path / "index.tsv"


def test_a_set_is_scanned_once(tmp_path: Path, table: Path) -> None:
    scan = Scan()
    for _ in range(3):
        found = indexed(tmp_path / "index", {"a": 1}, [table, tmp_path / "none"], scan)
        assert isinstance(found.sets["train"], EntryList)
        assert list(found.sets["train"]) == [ENTRY]
        assert (len(found.sets["valid"]), found.meta) == (0, {"taken": {"length": 3}})
    assert scan.calls == 1


def test_one_process_scans_and_the_others_wait(tmp_path: Path, table: Path) -> None:
    """Here threads, whose locks are those of processes."""
    scan, begun = Scan(), Event()

    def slow() -> Scanned:
        begun.set()
        time.sleep(0.2)
        return scan()

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(indexed, tmp_path / "index", 1, [table], slow)
        assert begun.wait(10)
        others = [pool.submit(indexed, tmp_path / "index", 1, [table], scan) for _ in range(2)]
        assert [list(each.result().sets["train"]) for each in (first, *others)] == [[ENTRY]] * 3
    assert scan.calls == 1


def test_other_settings_code_or_sources_are_scanned_anew(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = Scan()

    def calls(settings: object = 1) -> int:
        indexed(tmp_path / "index", settings, [table, tmp_path / "later"], scan)
        return scan.calls

    assert [calls(), calls(), calls(2), calls(2), calls()] == [1, 1, 2, 2, 2]
    os.utime(table, (1, 1))
    assert [calls(), calls()] == [3, 3]
    (tmp_path / "later").mkdir()
    assert [calls(), calls()] == [4, 4]
    monkeypatch.setattr(packed_index, "scanner_version", lambda: "other")
    assert [calls(), calls()] == [5, 5]


def test_a_damaged_index_is_made_again(tmp_path: Path, table: Path, caplog: pytest.LogCaptureFixture) -> None:
    scan = Scan()
    indexed(tmp_path / "index", 1, [table], scan)
    (file,) = (tmp_path / "index").glob("*.index")
    file.write_bytes(file.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        assert len(indexed(tmp_path / "index", 1, [table], scan).sets["train"]) == 2
    assert "is truncated or damaged" in caplog.text


def test_an_index_that_cannot_be_kept_costs_time_alone(
    tmp_path: Path, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = indexed(table / "index", 1, [table], Scan())
    assert found.sets["train"] == [ENTRY]
    assert "cannot be written" in caplog.text


def test_the_version_covers_what_scans() -> None:
    assert len(set(packed_index._SCANNERS)) == 6
    assert scanner_version() == scanner_version.__wrapped__()
