"""A search by several processes, in pieces, from memory or from the disk is the search of one."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import pytest
from pyhmmer.easel import Alphabet, TextSequence
from pyhmmer.plan7 import HMM, Background, Builder, TopHits

from fastfold.data.search.database import MAX_RESIDUES, SequenceDatabase
from fastfold.data.search.shard_pool import ShardPool, smallest_memory
from fastfold.errors import ConfigError, InputError
from tests.helpers.sequence_databases import queries, write_database

SETTINGS = {"E": 1e-3, "incE": 1e-4, "incdomE": 1e-3}
MEMORY = 1 << 30


def profiles() -> list[HMM]:
    alphabet = Alphabet.amino()
    return [
        Builder(alphabet, seed=42).build(
            TextSequence(name=name, sequence=sequence).digitize(alphabet), Background(alphabet)
        )[0]
        for name, sequence in queries().items()
    ]


def table(hits: TopHits) -> list[bytes]:
    """All hits and domains with scores and E-values as HMMER prints them."""
    buffer = io.BytesIO()
    hits.write(buffer, "targets", header=False)
    hits.write(buffer, "domains", header=False)
    return buffer.getvalue().splitlines()


def pool(database: SequenceDatabase, workers: int, **options: int) -> ShardPool:
    return ShardPool(database, SETTINGS, **({"num_workers": workers, "memory_bytes": MEMORY} | options))


@pytest.fixture
def database(tmp_path: Path) -> SequenceDatabase:
    return SequenceDatabase("made_up", write_database(tmp_path / "db.fasta", queries()))


@pytest.mark.long
def test_pieces_and_processes_change_nothing(database: SequenceDatabase, tmp_path: Path) -> None:
    wanted = profiles()
    with pool(database, 1) as one:
        expected = [table(hits) for hits in one.search(wanted)]
    assert [len(hits) > 15 for hits in expected] == [True, True]
    packed = SequenceDatabase("packed", tmp_path / "db.fasta.gz")
    packed.path.write_bytes(gzip.compress(database.path.read_bytes()))
    for place, workers, chunk_bytes in ((database, 1, 300), (database, 2, 500), (packed, 2, 400)):
        with pool(place, workers, chunk_bytes=chunk_bytes) as several:
            for _ in range(2):  # the second time from memory
                assert [table(hits) for hits in several.search(wanted)] == expected


def test_what_does_not_fit_is_read_again_with_the_same_result(
    database: SequenceDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = profiles()
    with pool(database, 1) as one:
        expected = [table(hits) for hits in one.search(wanted)]
    monkeypatch.setattr("fastfold.data.search.shard_pool._SMALLEST_PART", 600)
    monkeypatch.setattr("fastfold.data.search.shard_pool._PART_BYTES", 600)
    monkeypatch.setattr("fastfold.data.search.shard_pool._PROCESS_BYTES", 0)
    monkeypatch.setattr("fastfold.data.search.shard_pool._MERGED_AT_ONCE", 3)
    with pool(database, 1, memory_bytes=20_000, chunk_bytes=300) as tight:
        for _ in range(2):
            assert [table(hits) for hits in tight.search(wanted)] == expected
        assert 0 < len(tight._kept) < 10
        assert not tight._complete


def test_a_process_that_dies_is_replaced(database: SequenceDatabase, tmp_path: Path) -> None:
    wanted = profiles()
    with pool(database, 2, chunk_bytes=500) as several:
        expected = [table(hits) for hits in several.search(wanted)]
        next(iter(several._pools[0]._workers)).kill()  # type: ignore[union-attr]
        assert [table(hits) for hits in several.search(wanted)] == expected


def test_work_is_reported_in_bytes_and_residues(database: SequenceDatabase) -> None:
    told: list[tuple[int, int]] = []
    with pool(database, 1) as one:
        one.search(profiles(), lambda size, residues: told.append((size, residues)))
    letters = sum(len(x) for x in database.path.read_text().split("\n") if not x.startswith(">"))
    assert (sum(size for size, _ in told), sum(residues for _, residues in told)) == (
        database.path.stat().st_size,
        letters,
    )


def test_a_database_that_is_written_to_meanwhile_is_an_error(database: SequenceDatabase) -> None:
    with pool(database, 1) as one:
        one.search(profiles())
        os.utime(database.path, ns=(5, 5))
        with pytest.raises(InputError, match="was changed while it was searched"):
            one.search(profiles())


@pytest.mark.parametrize("memory", [1 << 30, 2 * smallest_memory()])
def test_bad_records_and_nucleic_acids_are_left_out_with_a_count(
    database: SequenceDatabase, memory: int
) -> None:
    """Hits and E-values are those of the database without them, and the second search counts no record twice."""
    with pool(database, 1) as one:
        expected = [table(hits) for hits in one.search(profiles())]
    relative = database.path.read_text().splitlines()[1]
    other = f">1abc_A mol:na length:9\n{relative}\n>7ooo_A mol:na length:8\nGG00CCAU\n"
    bad = f">bad\nMK-V\n>\nMKV\n>long\n{'A' * (MAX_RESIDUES + 1)}\n"
    database.path.write_text(other + database.path.read_text() + bad)
    with pool(database, 2, chunk_bytes=500, memory_bytes=memory) as several:
        for _ in range(2):
            assert [table(hits) for hits in several.search(profiles())] == expected
            assert several.skipped == (2, 3, "'bad': illegal character -")


def test_a_database_without_a_protein_is_refused_with_the_reason(database: SequenceDatabase) -> None:
    database.path.write_text(">bad\nMK0V\n>rna mol:na\nACGU\n")
    reason = r"1 that are not proteins \(mol:na\) and 1 that cannot be read \('bad': illegal character 0\)"
    with pool(database, 1) as one, pytest.raises(InputError, match=reason):
        one.search(profiles())


def test_too_little_memory_is_refused_before_anything_starts(database: SequenceDatabase) -> None:
    with pytest.raises(
        ConfigError, match=r"100 MiB is too small to search with 4 processes, which need 348 MiB"
    ):
        pool(database, 4, memory_bytes=100 << 20)
