"""A3M: rows, insertions and every way in which a file can be wrong."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.data.msa.formats import parse_colabfold
from fastfold.data.msa.msa import Msa, check_query, parse_a3m
from fastfold.errors import InputError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def refusal(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_a3m(text, path="x.a3m")
    return caught.value


def test_insertions_are_counted_before_the_next_column() -> None:
    """Lower case is dropped and counted; what follows the last column is not (AlphaFold's deletion matrix)."""
    msa = parse_a3m(">q the query\nMKV\n>a\naaM-cVdd\n>b\n-kKcc-\n")
    assert msa.sequences == ("MKV", "M-V", "-K-")
    assert msa.deletions.dtype == np.int32
    assert msa.deletions.tolist() == [[0, 0, 0], [2, 0, 1], [0, 1, 2]]
    assert msa.descriptions == ("q the query", "a", "b")


@pytest.mark.parametrize(
    "text",
    [
        ">q\nM\nK\n\nV\n>a\nMl\nKV",
        ">q\r\nMKV\r\n>a\r\nMlKV\r\n",
        "\ufeff>q\nMKV\n>a\nMlKV\n",
        "#3\t1\n>q\nMKV\n>a\nMlKV\n",
        "#3\t2\n>q\nMKV\n>a\nMlKV\n",
        "# my protein\n#\n>q\nMKV\n>a\nMlKV\n",
        ">ss_pred\nCCC\n>ss_conf\n912\n>q\nMKV\n>a\nMlKV\n",
        ">q\nMKV\n>a\nMlKV\n\0",
        ">q\nM.KV\n>a\nMlKV\n",
        ">q\nM KV\n>a\n Ml\tK V\n",
    ],
    ids=[
        "wrapped",
        "crlf",
        "bom",
        "colabfold",
        "homo-oligomer",
        "comments",
        "hh-suite",
        "final-NUL",
        "a2m",
        "blanks",
    ],
)
def test_variants_read_alike(text: str) -> None:
    """Wrapping, line ends, headers of other programs and A2M's padding change nothing."""
    msa = parse_a3m(text)
    assert msa.sequences == ("MKV", "MKV")
    assert msa.deletions.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert msa.descriptions == ("q", "a")


def test_dots_are_gaps_where_a_column_would_be_missing_otherwise() -> None:
    """'.' beside insertions is padding, '.' in a column is a gap."""
    msa = parse_a3m(">q\nMK.V\n>gap\nM..\n>padding\nMK.V\n>both\nMaK.V\n")
    assert msa.sequences == ("MKV", "M--", "MKV", "MKV")
    assert msa.deletions.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("text", "line", "record", "message"),
    [
        ("", None, None, "is empty"),
        ("\n\0\n", None, None, "is empty"),
        ("#3\t1\n", None, None, "has no rows"),
        (">ss_pred\nCCC\n", None, None, "has no rows"),
        ("MKV\n>a\nMKV\n", 1, None, "which starts with '>name'"),
        ("# STOCKHOLM 1.0\nq MKV\n//\n", 1, None, "rename it to .sto"),
        ("# STOCKHOLM 1.0\n\n#=GF ID x\n//\n", 1, None, "rename it to .sto"),
        (
            ">q\nMKV\n>a x\nMK\n>b\nMKV\n",
            3,
            "a x",
            "expected 3 columns as in the query (upper-case letters and gaps), found 2 in row 2",
        ),
        (
            ">q\nMKV\n>a\nMKVV\n",
            3,
            "a",
            "expected 3 columns as in the query (upper-case letters and gaps), found 4 in row 2",
        ),
        (">q\nMKV\n>a\n>b\nMKV\n", 3, "a", "found 0 in row 2"),
        (">q\nM\n\nKV\n>a\n\nM\n?V\n", 8, "a", "'?' is neither a residue nor a gap"),
        (">q\nM*V\n>a\nMKV\n", 1, "q", "has '*' (stop) before its end"),
        (">q\nMKV\n>a\nM**KV\n>b\nM*1\n", 6, "b", "'1' is neither"),
        ("#3\t1\n>q\nMKV\n#4\t1\n>r\nMKVL\n", 4, None, "a second alignment begins here"),
        ("#3\t1\r\n>q\r\nMKV\r\n\0#2,2\t1,1\r\n>r\r\nMKVL\r\n\0", 4, None, "a second alignment begins here"),
        (">q\nMKV\n>a\nM V\n", 3, "a", "found 2 in row 2"),
        (">q\nMKV\n>a\nM1V\n", 4, "a", "'1' is neither"),
        (">q\nM\u0394V\n", 2, "q", "'\u0394' is neither"),
        (">q\nMKV\n\0>b\nMKV\n", 3, "q", "MMseqs2"),
        (">q\nM\0V\n", 2, "q", r"'\x00' is neither"),
        (">q\n\n>a\nMKV\n", 1, "q", "lacks upper-case letters"),
        (">q\nmkv\n", 1, "q", "lacks upper-case letters"),
        (">q\nM-V\n>a\nMKV\n", 1, "q", "has gaps"),
        ("#3,x\t1,1\n>q\nMKV\n", 1, None, "expected ColabFold's first line"),
        ("#4\t1\n>q\nMKV\n", 1, None, "announces 4 columns, but the query has 3"),
        ("#2,1\t1,1\n>q\nMKV\n", 1, None, "ColabFold alignment of 2 chains"),
    ],
)
def test_bad_a3m_is_refused_by_line_and_row(
    text: str, line: int | None, record: str | None, message: str
) -> None:
    """Each bad file names what is wrong, the line and the row."""
    error = refusal(text)
    assert (error.line, error.record) == (line, record)
    assert message in str(error)
    assert str(error).startswith("x.a3m")


def make(query: str) -> Msa:
    return Msa((query,), np.zeros((1, len(query)), np.int32), ("query text",))


@pytest.mark.parametrize(
    ("row", "query", "message"),
    [
        ("MKV", "MRV", r"position 2 of its first row is 'K', of the target 'R' \(3 and 3 residues\)"),
        ("MKV", "MKVL", r"position 4 of its first row is the end, of the target 'L' \(3 and 4"),
        ("MKVL", "MKV", r"position 4 of its first row is 'L', of the target the end"),
        ("MXV", "MKV", "position 2 of its first row is 'X', of the target 'K'"),
        ("MKV", "MXV", "position 2 of its first row is 'K', of the target 'X'"),
    ],
)
def test_alignment_of_another_sequence_is_refused(row: str, query: str, message: str) -> None:
    """The first difference is shown with both residues."""
    with pytest.raises(InputError, match=message) as caught:
        check_query(make(row), query, path="x.a3m")
    assert caught.value.record == "query text"


@pytest.mark.parametrize(("row", "query"), [("MUV", "MXV"), ("MXV", "MUV"), ("MBZV", "MXXV"), ("MKV", "mkv")])
def test_letters_folded_as_x_agree_with_x(row: str, query: str) -> None:
    """A target whose selenocysteine became X fits the alignment made before."""
    check_query(make(row), query)


@pytest.mark.parametrize(
    "fields",
    [
        {"deletions": -np.ones((2, 3), np.int32)},
        {"deletions": np.full((2, 3), np.nan)},
        {"deletions": np.full((2, 3), 0.5)},
        {"deletions": np.full((2, 3), 2**40)},
        {"deletions": np.zeros((3, 3), np.int32)},
        {"deletions": np.zeros((2, 2), np.int32)},
        {"deletions": None},
        {"deletions": [["a", "b", "c"]] * 2},
        {"descriptions": ("query",)},
        {"descriptions": None},
        {"keys": ("one",)},
        {"keys": "ab"},
        {"sequences": ("MKT", "MK")},
        {"sequences": "MK"},
        {"sequences": (1, 2)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_alignments_made_in_python_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(fields))):
        Msa(
            **{
                "sequences": ("MKT", "M-T"),
                "deletions": np.zeros((2, 3)),
                "descriptions": ("q", "r"),
                **fields,
            }
        )


def test_deletions_may_be_any_whole_numbers() -> None:
    for deletions in (np.array([[0.0, 2.0]]), np.array([[0, 2]], np.uint8), [[0, 2]]):
        msa = Msa(("MK",), deletions, ("query",))  # type: ignore[arg-type]
        assert msa.deletions.dtype == np.int32
        assert msa.deletions.tolist() == [[0, 2]]


@st.composite
def alignments(draw: st.DrawFn) -> Msa:
    """Any alignment, insertions up to three residues long."""
    columns = draw(st.integers(1, 12))
    rows = draw(st.integers(0, 5))
    sequences = [draw(st.text(LETTERS, min_size=columns, max_size=columns))]
    sequences += [draw(st.text(LETTERS + "-", min_size=columns, max_size=columns)) for _ in range(rows)]
    counts = st.lists(st.integers(0, 3), min_size=columns, max_size=columns)
    deletions = np.array([[0] * columns] + [draw(counts) for _ in range(rows)], np.int32)
    return Msa(tuple(sequences), deletions, tuple(f"row{i} text" for i in range(rows + 1)))


def to_a3m(msa: Msa, draw: st.DataObject) -> str:
    """A3M text of an alignment with random inserted letters and wrapping."""
    width = draw.draw(st.integers(1, 20))
    text = ""
    for sequence, counts, description in zip(msa.sequences, msa.deletions, msa.descriptions, strict=True):
        row = ""
        for letter, count in zip(sequence, counts.tolist(), strict=True):
            row += draw.draw(st.text(LETTERS.lower(), min_size=count, max_size=count)) + letter
        lines = [row[k : k + width] for k in range(0, len(row), width)]
        text += "\n".join([f">{description}", *lines, ""])
    return text


@pytest.mark.long
@given(alignments(), st.data())
def test_round_trip(msa: Msa, data: st.DataObject) -> None:
    """Any alignment survives being written as A3M, however it is wrapped."""
    parsed = parse_a3m(to_a3m(msa, data))
    assert parsed.sequences == msa.sequences
    assert parsed.descriptions == msa.descriptions
    np.testing.assert_array_equal(parsed.deletions, msa.deletions)


@settings(max_examples=300)
@given(st.text(max_size=80) | st.text(st.sampled_from(">#\n\r MKmk-.*,1\t\0\ufeff/"), max_size=80))
def test_any_text_is_an_alignment_or_an_input_error(text: str) -> None:
    """No text raises anything but InputError; what passes is a rectangle below a query without gaps."""
    for read in (parse_a3m, _first_part):
        try:
            msa = read(text)
        except InputError:
            continue
        assert {len(row) for row in msa.sequences} == {msa.deletions.shape[1]}
        assert len(msa.sequences) == len(msa.descriptions) == len(msa.deletions)
        assert msa.as_is or "-" not in msa.sequences[0]
        assert msa.deletions.min() >= 0


def _first_part(text: str) -> Msa:
    """The rows of a ColabFold alignment's first chain."""
    part = parse_colabfold(text).parts[0]
    return part.unpaired or part.paired


COMPLEX = """#3,2\t1,1
>101\t102
MKVLL
>P1\tP2
MaKV-L
>P3\tP4
-K-Lcc-
>101
MKV--
>U1
M-V--
>102
---LL
>U2
---Lb-
"""


def test_colabfold_complex_is_split_by_chain() -> None:
    """Unpaired rows go to their chain, rows with residues in both chains are cut in two."""
    (first, second), warnings = parse_colabfold(COMPLEX)
    assert not warnings
    assert (first.query, second.query, first.copies, second.copies) == ("MKV", "LL", 1, 1)
    assert first.unpaired.sequences == ("MKV", "M-V")
    assert second.unpaired.sequences == ("LL", "L-")
    assert second.unpaired.deletions.tolist() == [[0, 0], [0, 1]]
    assert first.paired.sequences == ("MKV", "MKV", "-K-")
    assert first.paired.deletions.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert second.paired.sequences == ("LL", "-L", "L-")
    assert second.paired.deletions.tolist() == [[0, 0], [0, 0], [0, 2]]
    assert all(msa.as_is for part in (first, second) for kind in part.msas for msa in kind)


def test_colabfold_labels_are_those_of_the_chains_parts() -> None:
    """A tab separates them; where there are fewer than chains, the last one serves the others."""
    first, second = parse_colabfold(COMPLEX + ">one\nMKVLV\n").parts
    assert first.paired.descriptions == ("101", "P1", "P3", "one")
    assert second.paired.descriptions == ("102", "P2", "P4", "one")
    assert second.unpaired.descriptions == ("102", "U2")


def test_colabfold_rows_of_odd_lengths_are_cut() -> None:
    """Insertions between two chains belong to the latter; incomplete chains, gaps and repetitions are left out."""
    rows = ">a\nMKVaaLLbb\n>short\nMRVL\n>long\nMMVLLLL\n>gaps\n-----\n>a\nMKVaaLLbb\n>b\nMKVaaLLbb\n"
    (first, second), (warning,) = parse_colabfold("#3,2\t1,1\n>q\nMKVLL\n" + rows)
    assert first.unpaired.sequences == ("MRV",)
    assert second.unpaired is None
    assert first.paired.sequences == ("MKV", "MKV", "MMV", "MKV")
    assert second.paired.sequences == ("LL", "LL", "LL", "LL")
    assert second.paired.deletions.tolist() == [[0, 0], [2, 0], [0, 0], [2, 0]]
    assert warning.startswith("2 alignment rows, the first on line 6,")


def test_colabfold_homomer_has_nothing_to_pair() -> None:
    """All rows are the chain's own; the query alone makes a line of all copies."""
    (part,), _ = parse_colabfold("#3\t2\n>101\nMKV\n>h\nMRV\n")
    assert (part.copies, part.unpaired.sequences, part.paired.sequences) == (2, ("MKV", "MRV"), ("MKV",))
    (part,), _ = parse_colabfold("#3\t1\n>101\nMKV\n>h\nMRV\n")
    assert (part.copies, part.paired) == (1, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (">q\nMKV\n", "expected ColabFold's first line"),
        ("#3,0\t1,1\n>q\nMKV\n", "expected ColabFold's first line"),
        ("#3,2\t1\n>q\nMKVLL\n", "expected ColabFold's first line"),
        ("#3,2\t1,1\n>q\nMKV\n", "announces 5 columns, but the query has 3"),
        ("#2,2\t1,1\n>q\nMKMK\n", "two of the chains have the same sequence"),
        ("#2,1\t1,1\n>q\nMKV\n>a\nM?V\n", "is neither a residue nor a gap"),
        ("#2,1\t1,1\n>q\nMKV\n#2,1\t1,1\n>a\nMKV\n", "a second alignment begins here"),
    ],
)
def test_bad_colabfold_complex_is_refused(text: str, message: str) -> None:
    """The header and the rows must agree."""
    with pytest.raises(InputError, match=message):
        parse_colabfold(text)


def test_a_stop_codon_takes_no_column_or_is_an_unknown_residue_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """HH-suite leaves the symbol out; where a column would be missing, something stood there."""
    text = ">q\nMKV*\n>end\nMKV*\n>column\nM*V\n>insertion\nMa*KV\n>plain\nMK-\n"
    msa = parse_a3m(text, path="x.a3m")
    assert msa.sequences == ("MKV", "MKV", "MXV", "MKV", "MK-")
    assert msa.deletions.tolist() == [[0, 0, 0]] * 3 + [[0, 1, 0], [0, 0, 0]]
    assert [record.message for record in caplog.records] == [
        "x.a3m: '*' (stop codon) in 4 alignment rows, the first 'q' on line 1: left out outside the columns, otherwise "
        "read as X"
    ]
    caplog.clear()
    parts, _ = parse_colabfold("#2,1\t1,1\n>q\nMKV\n>a\nM*V\n>b\nM-V*\n")
    assert parts[0].paired is not None
    assert parts[0].paired.sequences == ("MK", "MX", "M-")
    assert len(caplog.records) == 1


def test_deep_alignment_is_read_fast() -> None:
    """Two million residues with insertions take well under the seconds that a loop over letters takes."""
    row = "MKVLAAGitGIVGAR" * 33
    text = f">q\n{row.upper()}\n" + "".join(f">r{i}\n{row.replace('it', 'IT')}ab\n" for i in range(4000))
    start = time.perf_counter()
    msa = parse_a3m(text)
    assert time.perf_counter() - start < 2.0
    assert msa.deletions.shape == (4001, 495)
