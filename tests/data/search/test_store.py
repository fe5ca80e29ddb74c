"""What was searched is kept by its sequence and its settings, whole or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from fastfold.data.search.store import RECORD, SearchKey, SearchStore, sequence_digest
from fastfold.errors import WriteError

KEY = SearchKey("uniref90", {"engine": "jackhmmer", "E": 1e-4, "database": {"sha256": "ab", "size": 7}})
FILES = {"uniref90_hits.sto": b"# STOCKHOLM 1.0\n//\n", "uniref90_taxonomy.tsv": b""}


def test_a_result_is_found_again_by_sequence_whatever_its_case(tmp_path: Path) -> None:
    store = SearchStore(tmp_path / "store")
    assert store.find("MKV", KEY) is None
    added = store.add("MKV", KEY, FILES, facts={"hits": 0})
    again = SearchStore(tmp_path / "store").find("mkv", SearchKey(KEY.name, dict(KEY.settings)))
    assert again == added
    assert {name: path.read_bytes() for name, path in added.items()} == FILES
    assert store.find("MKVA", KEY) is None


@pytest.mark.parametrize(
    "changed",
    [
        SearchKey("mgnify", KEY.settings),
        SearchKey("uniref90", {**KEY.settings, "E": 1e-3}),
        SearchKey("uniref90", {**KEY.settings, "database": {"sha256": "ac", "size": 7}}),
        SearchKey("uniref90", {**KEY.settings, "engine": "phmmer"}),
    ],
)
def test_other_settings_are_another_result_and_neither_replaces_the_other(
    tmp_path: Path, changed: SearchKey
) -> None:
    store = SearchStore(tmp_path)
    first = store.add("MKV", KEY, FILES)
    assert store.find("MKV", changed) is None
    store.add("MKV", changed, {"x": b"other"})
    assert store.find("MKV", KEY) == first


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "record"])
def test_a_damaged_result_is_not_found_and_can_be_added_again(tmp_path: Path, damage: str) -> None:
    store = SearchStore(tmp_path)
    path = store.add("MKV", KEY, FILES)["uniref90_hits.sto"]
    if damage == "cut":
        path.write_bytes(FILES["uniref90_hits.sto"][:-3])
    elif damage == "changed":
        path.write_bytes(FILES["uniref90_hits.sto"].replace(b"1.0", b"1.1"))
    elif damage == "missing":
        path.unlink()
    else:
        (path.parent / RECORD).write_text("{")
    assert store.find("MKV", KEY) is None
    store.add("MKV", KEY, FILES)
    found = store.find("MKV", KEY)
    assert found is not None
    assert found["uniref90_hits.sto"].read_bytes() == FILES["uniref90_hits.sto"]


def test_adding_twice_keeps_one_result_and_no_temporary_files(tmp_path: Path) -> None:
    store = SearchStore(tmp_path)
    assert store.add("MKV", KEY, FILES) == store.add("MKV", KEY, FILES)
    (entry,) = (tmp_path / sequence_digest("MKV")[:2] / sequence_digest("MKV")).iterdir()
    assert sorted(path.name for path in entry.iterdir()) == sorted([*FILES, RECORD])


def _stuck(folder: Path) -> None:
    """Begins to add a result and hangs when all but its renaming is done."""
    os.rename = lambda *_: time.sleep(60)  # type: ignore[assignment]
    SearchStore(folder).add("MKV", KEY, FILES)


def test_a_killed_process_leaves_no_result_and_the_next_one_sweeps_its_files(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_stuck, args=(tmp_path,))
    process.start()
    parent = tmp_path / sequence_digest("MKV")[:2] / sequence_digest("MKV")
    while not list(parent.glob(f".*/{RECORD}")):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    store = SearchStore(tmp_path)
    assert store.find("MKV", KEY) is None
    store.add("MKV", KEY, FILES)
    assert len(list(parent.iterdir())) == 1


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="the disk is full"):
        SearchStore(tmp_path).add("MKV", KEY, FILES)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
