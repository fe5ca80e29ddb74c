"""Files of hits: what is parsed, and that damage is one clear error."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.templates.hits import TemplateHit, is_ranked, parse_hhr, parse_hmmsearch
from fastfold.data.templates.source import read_hits
from fastfold.errors import InputError
from tests.helpers.template_files import HOMOLOGUE, QUERY, hhr, sto

HHR = hhr(
    [
        (
            "1ABC_A Some protein",
            QUERY[2:30] + "--" + QUERY[30:38],
            HOMOLOGUE[2:20] + "-" + HOMOLOGUE[20:39],
            30.5,
        ),
        ("2ABC_BB Another", QUERY[2:32], HOMOLOGUE[2:32], 28.0),
    ],
    start=3,
)
STO = sto(
    {
        "1abc_A/3-38": "--" + HOMOLOGUE[2:10] + "gg." + "-" + HOMOLOGUE[11:36] + "----",
        "2abc_B/1-40": "-" * 30 + "..." + "ACGUACGUAC",
        "3abc_c/11-50": HOMOLOGUE[:10] + "..." + HOMOLOGUE[10:],
    },
    {"2abc_B/1-40": "na"},
)


def test_hhsearch_hits_are_parsed() -> None:
    """Blocks are joined, numbers count from 0, gaps of either row are -1; the consensus is skipped."""
    first, second = parse_hhr(HHR, QUERY)
    assert (first.index, first.name, first.sum_probs) == (1, "1ABC_A Some protein", 30.5)
    assert first.pdb_chain == ("1abc", "A")
    assert first.letters == HOMOLOGUE[2:39]
    assert first.indices_query[:3] == (2, 3, 4)
    assert [place for place in first.indices_query if place >= 0] == list(range(2, 38))
    assert first.indices_hit[18] == -1
    mapping = first.mapping()
    assert (mapping[2], mapping[19], mapping[21], mapping[30]) == (0, 17, 18, 29)
    assert 20 not in mapping
    assert first.aligned_cols == len(mapping) == 35
    assert second.pdb_chain == ("2abc", "BB")
    assert is_ranked([first, second])


def test_hmmsearch_hits_are_parsed() -> None:
    """Insertions count as residues of the hit; what is no protein is left out, and counted."""
    first, third = parse_hmmsearch(STO, QUERY)
    assert (first.index, first.name, first.aligned_cols, first.sum_probs) == (1, "1abc_A", 33, None)
    assert first.letters == HOMOLOGUE[2:10] + "GG" + HOMOLOGUE[11:36]
    assert first.indices_query == tuple(range(40))
    mapping = first.mapping()
    assert (mapping[2], mapping[9], mapping[11], mapping[35]) == (0, 7, 10, 34)
    assert {0, 1, 10, 36} & set(mapping) == set()
    assert (third.index, third.pdb_chain) == (3, ("3abc", "c"))
    assert third.indices_hit[0] == 10
    assert not is_ranked([first])
    assert parse_hmmsearch("", QUERY) == []


def test_an_insertion_before_the_first_residue_belongs_to_no_hit() -> None:
    (hit,) = parse_hmmsearch(sto({"1abc_A/5-43": "-gg" + HOMOLOGUE[1:]}), QUERY)
    assert hit.letters == HOMOLOGUE[1:]
    assert hit.indices_hit[:3] == (-1, 6, 7)
    assert hit.mapping()[1] == 0


def test_files_are_told_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "pdb_hits.hhr").write_text(HHR)
    (tmp_path / "pdb_hits.sto.gz").write_bytes(gzip.compress(STO.encode()))
    (tmp_path / "pdb_hits.txt").write_text(STO)
    assert len(read_hits(tmp_path / "pdb_hits.hhr", QUERY)) == 2
    assert len(read_hits(tmp_path / "pdb_hits.sto.gz", QUERY)) == 2
    with pytest.raises(InputError, match=r"pdb_hits\.txt: the name of a file of template hits must end in"):
        read_hits(tmp_path / "pdb_hits.txt", QUERY)


def test_a_search_without_hits_has_none() -> None:
    assert parse_hhr(hhr([]), QUERY) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected HHsearch's output"),
        (HHR.replace("No 2\n", "No two\n"), ":20: a hit without number, name and scores"),
        (HHR.replace("Sum_probs=28.0", "Sum_probs=nan"), "lacks Aligned_cols and Sum_probs"),
        (HHR.replace("Sum_probs=28.0", "Sum_probs=2_8.0"), "lacks Aligned_cols and Sum_probs"),
        (HHR[: HHR.rindex("T name")], "differ in length|without an alignment"),
        (HHR.replace("   22 (40)", "   23 (40)", 1), "more or fewer residues than its numbers say"),
        (
            HHR.replace("name              23 ", "name              24 "),
            "does not continue at the end of the previous one",
        ),
        (HHR.replace(" (40)", ""), "not a row of an alignment"),
        (HHR[: HHR.index("Q name")], "a hit without an alignment"),
    ],
)
def test_damaged_hhsearch_output_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_hhr(text, QUERY, path="x.hhr")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "with a line '# STOCKHOLM'"),
        (STO.replace("//", ""), "is truncated"),
        (STO.replace("1abc_A/3-38", "1abc"), "expected a hit named <PDB id>_<chain>/<first>-<last>"),
        (
            STO.replace(HOMOLOGUE[11:36], HOMOLOGUE[11:35]),
            "its profile has 39 columns, the query 40 residues",
        ),
        (STO.replace(HOMOLOGUE[11:36], HOMOLOGUE[11:35] + "*"), ":8: not a row of an alignment"),
        (sto({"1abc_A/1-2": "-" * 40 + "gg"}), "the row lacks an aligned residue"),
    ],
)
def test_damaged_hmmsearch_output_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_hmmsearch(text, QUERY, path="x.sto")


def test_hits_of_another_sequence_are_refused() -> None:
    other = "W" + QUERY[1:3] + "W" + QUERY[4:]
    with pytest.raises(InputError, match="belong to another sequence, whose residue 4 is 'A'"):
        parse_hhr(HHR, other)
    with pytest.raises(InputError, match="belong to another sequence"):
        parse_hhr(HHR, QUERY[:20])
    with pytest.raises(InputError, match="belong to another sequence"):
        parse_hmmsearch(STO, QUERY + "A")
    unknown = QUERY[:3] + "X" + QUERY[4:]
    assert len(parse_hhr(HHR, unknown)) == 2


def _mutated(text: str, rng: np.random.Generator) -> str:
    """The text with a few characters or lines changed, dropped, doubled or cut off."""
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(max(len(text), 1)))
        kind = rng.integers(6)
        if kind == 0:
            text = text[:at]
        elif kind == 1:
            text = (
                text[:at]
                + chr(int(rng.choice([0, 10, 32, 45, 46, 65, 97, 48, 57, 233, 0x660])))
                + text[at + 1 :]
            )
        elif kind == 2:
            text = text[:at] + text[at + int(rng.integers(1, 40)) :]
        elif kind == 3:
            end = at + int(rng.integers(1, 80))
            text = text[:end] + text[at:end] + text[end:]
        else:
            lines = text.split("\n")
            a, b = (int(i) for i in rng.integers(len(lines), size=2))
            lines[a], lines[b] = lines[b], lines[a]
            text = "\n".join(lines if kind == 4 else lines[:a] + lines[a + 1 :])
    return text


def _survive(number: int) -> int:
    """Parses mutated files; how many were refused."""
    rng, refused = np.random.default_rng(0), 0
    for i in range(number):
        parse, source = ((parse_hhr, HHR), (parse_hmmsearch, STO))[i % 2]
        try:
            hits = parse(_mutated(source, rng), QUERY, path="x")
        except InputError:
            refused += 1
            continue
        for hit in hits:
            assert isinstance(hit, TemplateHit)
            mapping = hit.mapping()
            assert all(
                0 <= mine < len(QUERY) and 0 <= theirs < len(hit.letters) for mine, theirs in mapping.items()
            )
    return refused


def test_mutated_files_give_hits_or_one_clear_error() -> None:
    assert 30 < _survive(300) < 300


@pytest.mark.slow
def test_ten_thousand_mutated_files_give_hits_or_one_clear_error() -> None:
    assert 1000 < _survive(10_000) < 10_000
