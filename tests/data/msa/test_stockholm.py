"""Stockholm: AlphaFold's reading of query gaps, wrapping, and every way in which a file can be wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.data.msa.formats import parse_stockholm
from fastfold.errors import InputError
from tests.conftest import require_shared

HEADER = "# STOCKHOLM 1.0\n\n"


def test_columns_where_the_query_has_a_gap_are_counted_and_dropped() -> None:
    """A residue opposite a query gap is a deletion of the next column; gap against gap is nothing."""
    msa = parse_stockholm(HEADER + "query -M--KV-\na     AMCCKVW\nb     -MC-K--\nc     -------\n//\n")
    assert msa.sequences == ("MKV", "MKV", "MK-", "---")
    assert msa.deletions.dtype == np.int32
    assert msa.deletions.tolist() == [[0, 0, 0], [1, 2, 0], [0, 1, 0], [0, 0, 0]]


def test_blocks_are_joined_and_descriptions_kept() -> None:
    """Rows continue in later blocks by name; #=GS DE stays with its row; other annotation is skipped."""
    msa = parse_stockholm(
        HEADER
        + "#=GF ID  x\n#=GS a/1-3 DE [subseq from] Some protein OS=Homo sapiens\n#=GS a/1-3 OS human\n"
        + "#=GS a/1-3 DE more\n\nquery  MK\na/1-3  M-\n#=GR a/1-3 PP 9.\n#=GC RF xx\n\nquery  VL\na/1-3  vL\n//\n"
    )
    assert msa.sequences == ("MKVL", "M-VL")
    assert msa.descriptions == ("query", "a/1-3 [subseq from] Some protein OS=Homo sapiens more")


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n\n"])
def test_line_ends_dots_and_case_change_nothing(end: str) -> None:
    """'.' and '-' are the same gap, case has no meaning, any line end will do."""
    text = (HEADER + "q  M.KV\na  mc.v\n//\n").replace("\n", end)
    msa = parse_stockholm("\ufeff" + text)
    assert msa.sequences == ("MKV", "M-V")
    assert msa.deletions.tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("text", "line", "record", "message"),
    [
        ("", None, None, "is empty"),
        (HEADER + "//\n", None, None, "is empty"),
        (HEADER + "#=GC RF xx\n", None, None, "is empty"),
        (HEADER + "q MKV\na MKV\n", 5, None, "truncated"),
        (HEADER + "q MKV\na MK\n//\n", 4, "a", "row 2 has 2 columns, the first row has 3"),
        (HEADER + "q MK\na MK\n\nq VL\n//\n", 4, "a", "row 2 has 2 columns, the first row has 4"),
        (HEADER + "q MK\na MK\na MK\n//\n", 5, "a", "row 2 has 4 columns"),
        (HEADER + "q MK\na MK\n\nq VL\na V?\n//\n", 7, "a", "'?' is neither a residue nor a gap"),
        (HEADER + "q M\u0394\n//\n", 3, "q", "is neither"),
        (HEADER + "q M\0\n//\n", 3, "q", r"'\x00' is neither"),
        (HEADER + "q -.-\na MKV\n//\n", None, "q", "all gaps"),
        (HEADER + "q MKV extra\n//\n", 3, None, "expected a name and a piece of its row"),
        (HEADER + "MKV\n//\n", 3, None, "expected a name and a piece of its row"),
        (HEADER + "q MKV\n//\n# STOCKHOLM 1.0\nq MKV\n//\n", 5, None, "one alignment per file"),
        (">q\nMKV\n", 1, None, "rename it to .a3m"),
    ],
)
def test_bad_stockholm_is_refused_by_line_and_row(
    text: str, line: int | None, record: str | None, message: str
) -> None:
    """Each bad file names what is wrong, the line and the row."""
    with pytest.raises(InputError) as caught:
        parse_stockholm(text, path="x.sto")
    assert (caught.value.line, caught.value.record) == (line, record)
    assert message in str(caught.value)


@st.composite
def rows(draw: st.DrawFn) -> list[str]:
    """Equally long rows; the first has a residue at least."""
    columns = draw(st.integers(1, 15))
    row = st.text("ACDEFGHIKLMNPQRSTVWYXBZ--", min_size=columns, max_size=columns)
    return [draw(row.filter(lambda query: query.strip("-"))), *draw(st.lists(row, max_size=4))]


def write(aligned: list[str], width: int) -> str:
    text = HEADER
    for start in range(0, len(aligned[0]), width):
        text += "".join(f"row{i}   {row[start : start + width]}\n" for i, row in enumerate(aligned)) + "\n"
    return text + "//\n"


@given(rows(), st.integers(1, 20))
def test_wrapping_changes_nothing(aligned: list[str], width: int) -> None:
    """The same rows in blocks of any width are the same alignment."""
    whole, wrapped = parse_stockholm(write(aligned, 1000)), parse_stockholm(write(aligned, width))
    assert whole.sequences == wrapped.sequences
    np.testing.assert_array_equal(whole.deletions, wrapped.deletions)


@given(rows())
def test_equals_a_walk_over_letters(aligned: list[str]) -> None:
    """Sequences and deletions are those of a direct count, letter by letter."""
    msa = parse_stockholm(write(aligned, 1000))
    for i, row in enumerate(aligned):
        letters, counts, pending = "", [], 0
        for here, query in zip(row, aligned[0], strict=True):
            if query != "-":
                letters, counts, pending = letters + here, [*counts, pending], 0
            elif here != "-":
                pending += 1
        assert msa.sequences[i] == letters
        assert msa.deletions[i].tolist() == counts


def test_a_stop_codon_is_an_unknown_residue_but_not_one_of_the_query(
    caplog: pytest.LogCaptureFixture,
) -> None:
    msa = parse_stockholm(HEADER + "q MKV*\na M*V-\nb MKVL\n//\n", path="x.sto")
    assert msa.sequences == ("MKV", "MXV", "MKV")
    assert len(caplog.records) == 1
    assert "x.sto: '*' (stop codon) in 2 alignment rows, the first 'q' on line 3" in caplog.text


@settings(max_examples=300)
@given(st.text(max_size=80) | st.text(st.sampled_from("#=GSDE/>\n\r MKmk-.*1\t\0\ufeff"), max_size=80))
def test_any_text_is_an_alignment_or_an_input_error(text: str) -> None:
    """No text raises anything but InputError; what passes is a rectangle below a query without gaps."""
    for variant in (text, text + "\n//\n"):
        try:
            msa = parse_stockholm(variant)
        except InputError:
            continue
        assert {len(row) for row in msa.sequences} == {msa.deletions.shape[1]}
        assert "-" not in msa.sequences[0]
        assert msa.deletions.min() >= 0


def test_every_truncation_of_a_real_file_is_noticed() -> None:
    """A download that stops anywhere is refused, never read as a shallower alignment."""
    text = (require_shared("data", "2q2k", "2q2k_A") / "mgnify_hits.sto").read_text()
    assert len(parse_stockholm(text).sequences) == 7
    for stop in range(0, text.rindex("//") + 1, 7):
        with pytest.raises(InputError):
            parse_stockholm(text[:stop])
