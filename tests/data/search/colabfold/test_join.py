"""Alignments of several queries come apart and together again as ColabFold has them."""

from __future__ import annotations

import pytest

from fastfold.data.msa.formats import parse_colabfold
from fastfold.data.search.colabfold.source import fasta_of, join_complex, split_queries
from fastfold.errors import InputError
from tests.conftest import require_shared
from tests.helpers.colabfold_records import expected

PAIRED = [">101\nMKV\n>a\t5\nM-V\n>DUMMY\n---\n", ">102\nLLAA\n>b\nLLaAA\n>c\nLL-A\n"]
UNPAIRED = [">101\nMKV\n>u1\nMkKV\n>101\nMKV\n>e1\n-KV\n", ">101\nLLAA\n>u2\n--AA\n"]


def test_queries_are_numbered_from_101() -> None:
    assert fasta_of(["MK", "VL"]) == ">101\nMK\n>102\nVL\n"


def test_a_file_of_several_queries_is_cut_apart() -> None:
    content = "\0".join([PAIRED[1], PAIRED[0], ""]).encode()
    assert split_queries(content, ["MKV", "LLAA"], origin="x") == PAIRED


def test_a_query_without_a_block_has_its_own_row() -> None:
    assert split_queries(b"\0\n\0", ["MKV"], origin="x") == [">101\nMKV\n"]
    assert split_queries(PAIRED[0].encode(), ["MKV", "LLAA"], origin="x") == [PAIRED[0], ">102\nLLAA\n"]


def test_letters_that_stand_for_no_residue_may_come_back_as_x() -> None:
    (text,) = split_queries(b">101\nMXV\n", ["MUV"], origin="x")
    assert text == ">101\nMXV\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b">103\nMKV\n", "found one that begins '>103"),
        (b">100\nMKV\n", "expected the alignment of a query"),
        (b">x\nMKV\n", "expected the alignment of a query"),
        (b"<html></html>", "expected the alignment of a query"),
        (b">101\nMKL\n", "another sequence|differs|query"),
        (b">101\nMKV\n>a\nMK\n", "columns"),
        (b">101\nMKV\n\0>101\nMKV\n", "two alignments of query 101"),
    ],
)
def test_what_is_no_alignment_of_the_queries_is_refused(content: bytes, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        split_queries(content, ["MKV"], origin="x")


def test_a_complex_is_joined_as_its_reader_has_it() -> None:
    text = join_complex(["MKV", "LLAA"], [2, 1], UNPAIRED, PAIRED)
    assert text == (
        "#3,4\t2,1\n"
        ">101\t102\nMKVLLAA\n>a\t5\tb\nM-VLLaAA\n>DUMMY\tc\n---LL-A\n"
        ">101\nMKV----\n>u1\nMkKV----\n>101\nMKV----\n>e1\n-KV----\n"
        ">101\n---LLAA\n>u2\n-----AA\n"
    )
    first, second = parse_colabfold(text).parts
    assert (first.query, first.copies, second.query, second.copies) == ("MKV", 2, "LLAA", 1)
    assert first.paired is not None
    assert second.paired is not None
    assert first.paired.sequences == ("MKV", "M-V")
    assert second.paired.sequences == ("LLAA", "LLAA")
    assert second.paired.deletions.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
    assert first.unpaired is not None
    assert second.unpaired is not None
    # A row that has no residue in the other chain is its chain's own.
    assert first.unpaired.sequences == ("MKV", "MKV", "-KV")
    assert second.unpaired.sequences == ("LL-A", "LLAA", "--AA")


def test_copies_of_one_chain_are_paired_with_the_query_alone() -> None:
    text = join_complex(["MKV"], [3], UNPAIRED[:1], None)
    assert text.startswith("#3\t3\n>101\nMKV\n>101\nMKV\n>u1\nMkKV\n")
    (part,) = parse_colabfold(text).parts
    assert part.copies == 3
    assert part.paired is not None
    assert part.paired.sequences == ("MKV",)


def test_pairs_without_a_partner_are_refused() -> None:
    with pytest.raises(InputError, match="found 3, 1"):
        join_complex(["MKV", "LLAA"], [1, 1], UNPAIRED, [PAIRED[0], ">102\nLLAA\n"])


def test_complexes_are_written_as_colabfold_wrote_them() -> None:
    """Recorded answers of a server, and the files that ColabFold 1.6.3 made of them."""
    folder = require_shared("oracles_data", "colabfold_inputs")
    compared = 0
    for key, case in expected(folder)["server"].items():
        if key.endswith("/unpaired_paired") and "a3m_written" in case and sum(case["cardinality"]) > 1:
            paired = case["paired"] if len(case["sequences"]) > 1 else None
            text = join_complex(case["sequences"], case["cardinality"], case["unpaired"], paired)
            assert text.rstrip("\n") == case["a3m_written"].rstrip("\n"), key
            compared += 1
    assert compared == 4
