"""An A3M as a query: what is refused, and what is said of rows that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fastfold.data.msa.msa import ChainMsas
from fastfold.data.queries.formats import MAX_CHAINS, add_alignments, parse_a3m_query
from fastfold.data.queries.records import QueryFile, Record
from fastfold.errors import InputError

COMPLEX = "#3,2\t2,1\n>1\t2\nMKVLA\n>a\tb\nMRVL-\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("#3,x\t1,1\n>q\nMKVLA\n", 1, "expected ColabFold's first line"),
        ("#3,2\t1\n>q\nMKVLA\n", 1, "expected ColabFold's first line"),
        ("#3,2\t1,0\n>q\nMKVLA\n", 1, "expected ColabFold's first line"),
        ("#3,2\n>q\nMKVLA\n", 1, "expected ColabFold's first line"),
        ("#3,3\t1,1\n>q\nMKVLA\n", 1, "announces 6 columns, but the query has 5"),
        ("#2,2\t1,1\n>q\nMKMK\n", 1, "two of the chains have the same sequence"),
        ("#2,2\t1,1\n>q\nMXMU\n", 1, "two of the chains have the same sequence"),
        (f"#3\t{MAX_CHAINS + 1}\n>q\nMKV\n", 1, "1,001 chains, more than 1,000"),
        (">q\nMkKV\n>h\nMaKV\n", 1, "has 'k' in lower case"),
        ("#3,2\t2,1\n>1\t2\nMKVLa\n", 2, "has 'a' in lower case"),
        (">q\nMKV\n>h\nMK\n", 3, "found 2 in row 2"),
        (">q\nMKV\n>h\nMK1\n", 4, "'1' is neither a residue nor a gap"),
        (">q\n", 1, "lacks upper-case letters"),
        ("", None, "is empty"),
    ],
)
def test_bad_alignments_are_refused(text: str, line: int | None, message: str) -> None:
    """The place, and what to do."""
    with pytest.raises(InputError, match=message) as caught:
        parse_a3m_query(QueryFile("x.a3m", text.encode()))
    assert (caught.value.path, caught.value.line) == ("x.a3m", line or caught.value.line)


def test_rows_that_are_cut_are_told_of() -> None:
    """ColabFold leaves out what is beyond the query, and chains that are not complete, without a word."""
    text = COMPLEX + ">long\nMKVLAAAA\n>short\nMKVL\n"
    record = parse_a3m_query(QueryFile("x.a3m", text.encode()))
    (warning,) = record.warnings
    assert warning.startswith("2 alignment rows, the first on line 6, have more or fewer columns")
    assert record.alignments is not None
    unpaired, paired = record.alignments[2]
    assert [msa.sequences for msa in unpaired] == []
    assert [msa.sequences for msa in paired] == [("LA", "L-", "LA")]
    assert [msa.sequences for msa in record.alignments[0][0]] == [("MKV",)]


def test_letters_read_as_x_are_told_of_and_kept() -> None:
    """The network is shown what an alignment would have."""
    record = parse_a3m_query(QueryFile("x.a3m", b"#2,1\t1,1\n>q\nMUK\n"))
    assert record.sequences == ["MU", "K"]
    assert record.warnings == ["chain A: U at 2 read as X (unknown residue)"]


def test_alignments_serve_the_chains_in_any_order(tmp_path: Path) -> None:
    """A target that is written down elsewhere has them in its own order; other chains are refused."""
    (tmp_path / "x.a3m").write_text(COMPLEX)

    def alignments(*sequences: str) -> Sequence[ChainMsas]:
        record = Record("t", 2, list(sequences), [])
        return add_alignments(record, tmp_path / "t.csv", "x.a3m").alignments or ()

    first, _, third = alignments("MKV", "LA", "MKV")
    assert first[1][0].sequences[0] == "MKV"
    assert third is first
    for sequences in (["MKV", "LA"], ["MKV", "LA", "LA"], ["MKV", "MKV", "LV"]):
        with pytest.raises(InputError, match=r"differ from those of '.*t\.csv'"):
            alignments(*sequences)
