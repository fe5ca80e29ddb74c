"""Entries in a file equal those that were put in, and are decoded when they are asked for."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.training.entry import DISTILLATION, ComplexEntry, Entry
from fastfold.data.training.packed.records import (
    EntryList,
    RecordFile,
    add_entries,
    entry_fields,
    entry_of,
    weights_of,
    writing_records,
)
from fastfold.data.training.sampling import sampling_weights
from fastfold.utils.text_files import FileSlice

SLICES = (FileSlice(Path("dbs/a.db"), "uniref90_hits.a3m", 3, 5), FileSlice(Path("dbs/a.db"), "x.hhr", 8, 0))
MEMBERS = (
    Entry("1abc_A", Path("mmcifs/1abc.cif"), "MKV", "A", Path("alignments"), resolution=2.5, cluster_size=3),
    Entry("1abc_B", Path("mmcifs/1abc.cif"), "WW", "B", alignment_files=SLICES, alignment_name="2abc_A"),
)
ENTRIES = (
    *MEMBERS,
    Entry(
        "p", Path("p.pdb"), "M" * 600, resolved=0.5, msa_rows=7, weight=2.5, source=DISTILLATION, cluster="c"
    ),
    Entry("d", Path("d.pdb"), "M", release_date="2001-02-03"),
    ComplexEntry("1abc", Path("mmcifs/1abc.cif"), "MKVWW", weight=1.5, members=MEMBERS),
)


@pytest.fixture
def found(tmp_path: Path) -> EntryList:
    with writing_records(tmp_path / "set") as writer:
        add_entries(writer, "train", ENTRIES)
        add_entries(writer, "valid", ())
    return EntryList(RecordFile(tmp_path / "set"), "train")


def test_entries_come_back(found: EntryList, tmp_path: Path) -> None:
    assert tuple(found) == ENTRIES
    assert [type(one) for one in found] == [type(one) for one in ENTRIES]
    assert (found[-1], found[1:3]) == (ENTRIES[-1], ENTRIES[1:3])
    with pytest.raises(IndexError):
        found[5]
    assert tuple(pickle.loads(pickle.dumps(found))) == ENTRIES
    assert len(EntryList(RecordFile(tmp_path / "set"), "valid")) == 0


def test_weights_are_the_sampling_weights(found: EntryList) -> None:
    np.testing.assert_array_equal(found.weights, sampling_weights(ENTRIES))
    np.testing.assert_array_equal(weights_of(found), weights_of(ENTRIES))


def test_only_what_is_not_the_default_is_kept() -> None:
    for entry in ENTRIES:
        assert entry_of(entry_fields(entry)) == entry
    assert set(entry_fields(ENTRIES[3])) == {"id", "structure", "sequence", "release_date"}
