"""Parts become digital sequences; what does not fit is not kept; bad records are named."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from fastfold.data.search.database import MAX_RESIDUES, DatabasePart
from fastfold.data.search.shard_pool import ShardSearcher, ShardTask, digitize
from fastfold.errors import InputError

PART = DatabasePart(0, Path("db.fasta"), (), b"", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b">a\nMKV\n>b2 words\nMK-V\n>c\nM\n",
            r"db\.fasta \(record 'b2'\): cannot be parsed \(illegal character -\)",
        ),
        (b">a\nMK1V\n", r"record 'a'.*illegal character 1"),
        (b">a\nMKV\n>\nMKV\n", "no FASTA name found"),
        (b">a\nMKV\n>big\n" + b"A" * (MAX_RESIDUES + 1), "record 'big'.*has 100,001 residues"),
    ],
)
def test_a_record_that_cannot_be_searched_is_named(text: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        digitize(text, PART)
    assert gc.isenabled()


def test_names_may_have_any_bytes_and_sequences_any_letters() -> None:
    block = digitize(b">a caf\xe9 \xff\nmkvbjouzx*\n>b\nMKV\n", PART)
    assert [(s.name, len(s)) for s in block] == [("a", 10), ("b", 3)]
    assert block[0].description == "caf\ufffd \ufffd"


def test_no_records_are_no_sequences() -> None:
    assert len(digitize(b"\n", PART)) == 0


def test_what_fits_into_the_memory_is_kept_and_no_more() -> None:
    texts = [b">a\n" + b"MKVLA" * 2000 + b"\n" for _ in range(3)]
    parts = [DatabasePart(number, Path("db"), (), text, len(text)) for number, text in enumerate(texts)]
    searcher = ShardSearcher({}, 30_000)
    kept = [searcher(part.number, ShardTask(part, [])).is_kept for part in parts]
    assert kept[0]
    assert not kept[2]
    lost = parts[0]._replace(text=None)
    assert searcher(0, ShardTask(lost, [])).num_residues == 10_000
    with pytest.raises(InputError, match="a worker process was lost"):
        ShardSearcher({}, 30_000)(0, ShardTask(lost, []))
