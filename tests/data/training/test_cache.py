"""The cache of parsed chains: equal to parsing, and unharmed by versions, damage, and writers that race or die."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.training import cache as feature_cache
from fastfold.data.training import cache_format
from fastfold.data.training.cache import FeatureCache
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import Entry, EntryData, group_complexes, read_entry
from fastfold.errors import InputError, OutputError
from tests.conftest import REPOSITORY, require_shared
from tests.helpers.small_sets import a3m, indexed_folder, pdb_text, write
from tests.helpers.spawn_ranks import CONTEXT


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return open_dataset(indexed_folder(tmp_path / "data"), split="train")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def assert_equal(found: EntryData, expected: EntryData) -> None:
    assert (found.resolution, found.release_date) == (expected.resolution, expected.release_date)
    for one, other in zip(found.chains, expected.chains, strict=True):
        assert (one.chain_id, one.sequence) == (other.chain_id, other.sequence)
        for name in ("positions", "mask", "residue_index", "b_factors"):
            value, wanted = getattr(one, name), getattr(other, name)
            assert value.dtype == wanted.dtype
            np.testing.assert_array_equal(value, wanted)
    for ours, theirs in zip(found.msas, expected.msas, strict=True):
        assert [len(msas) for msas in ours] == [len(msas) for msas in theirs]
        for msa, wanted in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            assert (msa.sequences, msa.descriptions) == (wanted.sequences, wanted.descriptions)
            assert msa.deletions.dtype == wanted.deletions.dtype
            np.testing.assert_array_equal(msa.deletions, wanted.deletions)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.npz"))


def test_cached_entry_equals_the_parsed_one(entry: Entry, folder: Path) -> None:
    cache = FeatureCache(folder)
    expected = read_entry(entry)
    assert_equal(cache.read(entry), expected)
    again = pickle.loads(pickle.dumps(cache))
    assert_equal(again.read(entry), expected)
    assert (cache.hits, cache.misses, again.hits, again.misses) == (0, 1, 1, 1)
    assert cache.report().entries == 1
    assert cache.report().size == files(folder)[0].stat().st_size


def test_cached_experimental_structures_equal_the_parsed_ones(folder: Path) -> None:
    """Real chains with real alignments, bit for bit."""
    found = open_dataset(require_shared("data", "structures"), split="valid")
    cache = FeatureCache(folder)
    for entry in found[::40]:
        expected = read_entry(entry)
        cache.read(entry)
        assert_equal(cache.read(entry), expected)
    assert cache.hits == cache.misses > 5


def test_cached_complex_equals_the_parsed_one(tmp_path: Path, folder: Path) -> None:
    """Structure and alignments, those to pair too; a file that changes is read again, the others are not."""
    chains = {"A": "MKVLAAGIT", "B": "WWHHKKPPMM", "C": "MKVLAAGIT"}
    write(tmp_path / "mmcifs" / "1abc.pdb", pdb_text(chains))
    for chain in "AB":
        place = tmp_path / "alignments" / f"1abc_{chain}"
        write(place / "uniref90_hits.a3m", a3m(chains[chain], chains[chain].lower() + chains[chain][::-1]))
        write(place / "uniprot_hits.a3m", a3m(chains[chain], chains[chain][::-1]))
    (complex_,) = group_complexes(open_dataset(tmp_path, layout="openfold").entries)
    cache, expected = FeatureCache(folder), read_entry(complex_)
    for _ in range(2):
        found = cache.read(complex_)
        assert len(found.chains) == 3
        assert_equal(found, expected)
    assert (cache.hits, cache.misses) == (5, 5)
    write(tmp_path / "alignments" / "1abc_B" / "uniref90_hits.a3m", a3m(chains["B"]))
    assert len(cache.read(complex_).msas[1].unpaired[0].sequences) == 1
    assert (cache.hits, cache.misses) == (9, 6)


def test_a_cached_alignment_serves_the_chain_that_it_was_read_for(tmp_path: Path, folder: Path) -> None:
    """A structure that was corrected by a residue has the same alignment, whose first row is the new chain."""
    before, after = "MKVLAAGITWWHHKKPPMMRRDDEE", "MKVLAAGITWWHHKKPPMMRRDDEN"
    cache = FeatureCache(folder)
    write(tmp_path / "msas" / "1abc.a3m", a3m(before))
    for sequence in (before, after):
        write(tmp_path / "1abc.pdb", pdb_text({"A": sequence}))
        (complex_,) = group_complexes(open_dataset(tmp_path).entries)
        (msas,) = cache.read(complex_).msas
        assert msas.unpaired[0].sequences == (sequence,)


def test_changed_source_is_read_again(entry: Entry, folder: Path) -> None:
    """Content decides, not time: the structure, the alignment, and whether there is one."""
    cache = FeatureCache(folder)
    cache.read(entry)
    os.utime(entry.structure)
    cache.read(entry)
    assert (cache.hits, cache.misses) == (1, 1)
    write(entry.structure, pdb_text({"A": "MKVLAAGIT"}, b_factors={1: 12.0}))
    assert cache.read(entry).chain.b_factors[0].max() == 12
    (alignment,) = entry.alignments()
    write(alignment, a3m("MKVLAAGIT"))
    assert len(cache.read(entry).alignments[0].sequences) == 1
    alignment.unlink()
    assert cache.read(entry).alignments == ()
    assert (cache.hits, cache.misses) == (1, 4)


def test_sources_that_cannot_be_used_are_the_same_error_as_without_a_cache(
    entry: Entry, folder: Path
) -> None:
    cache = FeatureCache(folder)
    (alignment,) = entry.alignments()
    write(alignment, a3m("WWWWWWWWW"))
    with pytest.raises(InputError, match=r"1aaa_A\.a3m\.gz.*another sequence"):
        cache.read(entry)
    entry.structure.unlink()
    with pytest.raises(InputError, match=r"1aaa_A\.pdb\.gz: no such file"):
        cache.read(entry)
    assert files(folder) == []


def test_entry_of_another_version_is_made_again_and_said_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = open_dataset(indexed_folder(tmp_path / "data"), split="train")
    old = FeatureCache(folder, version="old")
    for entry in entries:
        old.read(entry)
    caplog.clear()
    for cache in (FeatureCache(folder), FeatureCache(folder)):  # as in two processes
        for entry in entries:
            assert_equal(cache.read(entry), read_entry(entry))
    assert (cache.hits, cache.misses) == (3, 0)
    assert [record.message for record in caplog.records] == [
        f"the cache {folder} was written by another version; its entries are made again"
    ]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other", "pickle"])
def test_damaged_entry_is_made_again(
    entry: Entry, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the bytes, the data are right, and the entry is whole afterwards."""
    cache = FeatureCache(folder)
    expected = cache.read(entry)
    (path,) = files(folder)
    content = bytearray(path.read_bytes())
    if damage == "empty":
        content.clear()
    elif damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[content.index(b"positions.npy") + 400] ^= 1
    elif damage == "other":
        arrays = cache_format.data_arrays(expected)
        content[:] = cache_format.to_bytes(arrays, cache.version, "digest of another chain")
    else:
        np.savez(path, version=np.array([object()]))
        content[:] = path.read_bytes()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert_equal(cache.read(entry), expected)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"the cache entry {path} cannot be read"
    ]
    assert_equal(cache.read(entry), expected)
    assert (cache.hits, cache.misses) == (1, 2)


def write_often(folder: Path, entry: Entry, stop: Path) -> None:
    """Makes the entry again and again, as a writer that never finds it."""
    cache = FeatureCache(folder)
    cache._load = lambda path, digest: None  # type: ignore[method-assign]
    while not stop.exists():
        cache.read(entry)


def test_two_writers_and_a_killed_one_leave_a_whole_entry(
    entry: Entry, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader beside two writers never sees a part of an entry; one of them is killed in between."""
    expected = read_entry(entry)
    cache = FeatureCache(folder)
    cache.read(entry)
    stop = folder / "stop"
    writers = [CONTEXT.Process(target=write_often, args=(folder, entry, stop), daemon=True) for _ in range(2)]
    for writer in writers:
        writer.start()
    (path,) = files(folder)
    first = path.stat().st_mtime_ns
    end = time.time() + 30
    while path.stat().st_mtime_ns == first and time.time() < end:
        time.sleep(0.01)  # until a writer replaces the entry
    for reads in range(200):
        assert_equal(cache.read(entry), expected)
        if reads == 100:
            assert writers[0].pid is not None
            os.kill(writers[0].pid, signal.SIGKILL)
    stop.touch()
    for writer in writers:
        writer.join()
    assert path.stat().st_mtime_ns != first  # not the inode, whose number may be given again
    assert [writer.exitcode for writer in writers] == [-signal.SIGKILL, 0]
    assert (cache.hits, cache.misses) == (200, 1)
    assert files(folder) == [path]
    assert caplog.records == []


def die(*unused: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_before_the_rename(folder: Path, entry: Entry) -> None:
    os.replace = die  # type: ignore[assignment]
    FeatureCache(folder).read(entry)


def test_what_a_killed_writer_leaves_is_removed_later(entry: Entry, folder: Path) -> None:
    writer = CONTEXT.Process(target=killed_before_the_rename, args=(folder, entry))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    (left,) = (folder / "temporary").iterdir()
    assert files(folder) == []
    FeatureCache(folder).read(entry)  # another writer may be alive still, so it stays for now
    assert left.exists()
    os.utime(left, (0, 0))
    FeatureCache(folder)
    assert not left.exists()
    assert len(files(folder)) == 1


def test_cache_that_cannot_be_written_costs_no_sample(
    entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is said once, and leaves no part of a file."""
    cache = FeatureCache(folder)

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for _ in range(2):
        assert_equal(cache.read(entry), read_entry(entry))
    assert [record.message for record in caplog.records] == [
        f"the cache {folder} cannot be written (No space left on device); missing entries are parsed each time"
    ]
    assert list((folder / "temporary").iterdir()) == []


def test_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot make the cache folder"):
        FeatureCache(tmp_path / "file" / "cache")


def test_version_follows_the_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint covers the readers of structures, alignments and template hits, and the tables that they use."""
    files = feature_cache._parser_files()
    assert len(set(files)) == len(feature_cache._PARSERS) + 1
    assert all(file.read_bytes() for file in files)
    wanted = {"read.py", "pdb_reader.py", "msa.py", "hits.py", "templates.py", "residue_constants.json"}
    assert wanted <= {file.name for file in files}
    version = feature_cache.parser_version.__wrapped__
    before = version()
    assert before == version()
    monkeypatch.setattr(feature_cache, "_PARSERS", feature_cache._PARSERS[:-1])
    assert version() != before
    monkeypatch.setattr(feature_cache, "_PARSERS", ("fastfold.data.missing",))
    with pytest.raises(ModuleNotFoundError):
        version()


def test_version_covers_every_module_that_reads_structures() -> None:
    """A fresh interpreter says which modules the reader loads."""
    code = "import fastfold.protein.io.read, sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    readers = {name for name in run.stdout.split() if name.startswith("fastfold.protein.io.")}
    assert readers <= set(feature_cache._PARSERS)


def test_an_entry_that_unpacks_to_more_than_it_is_is_refused() -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, version=np.array(["1", "x"]), rows=np.zeros(1 << 20, np.uint8))
    with pytest.raises(cache_format.Unusable, match="it unpacks to"):
        cache_format.from_bytes(buffer.getvalue(), "1", "x")
