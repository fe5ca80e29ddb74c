"""Building packed sets: order, numbers of records, and entries that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.training.entry import ComplexMsas, Entry, EntryData
from fastfold.data.training.packed.records import EntryList, RecordFile
from fastfold.data.training.packed.samples import SAMPLES, MakeRecord, build, of_record
from fastfold.errors import ConfigError, InputError
from tests.helpers.sample_chains import chain_structure


def entry(name: str) -> Entry:
    return Entry(name, Path(f"{name}.pdb"), "MKV")


def read(one: Entry) -> EntryData:
    if one.id.startswith("bad"):
        raise InputError("is broken", path=one.structure)
    return EntryData((chain_structure(0, 5, chain_id=one.id),), (ComplexMsas(),), None)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_entries_have_the_numbers_of_their_records(tmp_path: Path, workers: int) -> None:
    sets = {
        "train": [entry(name) for name in ("a", "bad1", "b")],
        "none": [],
        "valid": [entry("b"), entry("c")],
    }
    said: list[str] = []
    failed = build(
        tmp_path / "set", sets, MakeRecord(read), meta={"more": 1}, workers=workers, say=said.append
    )
    assert failed == [("bad1", "bad1.pdb: is broken")]
    file = RecordFile(tmp_path / "set")
    assert (file.count(SAMPLES), file.meta["more"], file.meta["sets"]) == (4, 1, ["train", "none", "valid"])
    assert file.meta["failed"] == [["bad1", "bad1.pdb: is broken"]]
    for name, expected in (("train", ["a", "b"]), ("none", []), ("valid", ["b", "c"])):
        found = EntryList(file, name)
        assert [one.id for one in found] == expected
        for one in found:
            assert one.record is not None
            data = of_record(file.record(SAMPLES, one.record))
            assert data.chains[0].chain_id == one.id
    assert said == ["train: 2 of 3 entries are packed", "valid: 2 of 2 entries are packed"]


def test_a_set_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none of 2 entries of train can be used; the first is bad1: bad1\.pdb"
    ):
        build(tmp_path / "set", {"train": [entry("bad1"), entry("bad2")]}, MakeRecord(read), meta={})
    assert not list(tmp_path.iterdir())
