"""Filters take what they say, and count it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import DISTILLATION, Entry, group_complexes
from fastfold.data.training.sampling import Filters, apply_filters, largest_share
from fastfold.errors import ConfigError
from tests.helpers.small_sets import a3m, pdb_text, write

NOWHERE = Path("nowhere.pdb")


def entry(name: str, sequence: str = "MKVLAAGIT", **values: object) -> Entry:
    return Entry(name, NOWHERE, sequence, **values)  # type: ignore[arg-type]


def left(filters: Filters, *entries: Entry) -> list[str]:
    return [kept.id for kept in apply_filters(entries, filters).entries]


def test_resolution_at_the_bound_stays_and_an_unknown_one_too() -> None:
    entries = [entry("at", resolution=9.0), entry("over", resolution=9.01), entry("nmr")]
    assert left(Filters(), *entries) == ["at", "nmr"]


def test_single_residue_share_at_the_bound_stays() -> None:
    assert largest_share("GGGGA") == 0.8
    assert left(Filters(), entry("at", "GGGGA"), entry("over", "GGGGGA")) == ["at"]


def test_length_bounds_are_inclusive() -> None:
    entries = [entry(str(n), "MKVLAAGIT"[:n]) for n in (3, 4, 5, 6)]
    assert left(Filters(min_length=4, max_length=5), *entries) == ["4", "5"]


def test_release_date_must_be_known_of_experimental_structures() -> None:
    entries = [
        entry("before", release_date="2018-04-30"),
        entry("after", release_date="2018-05-01"),
        entry("unknown"),
        entry("predicted", source=DISTILLATION),
    ]
    assert left(Filters(max_release_date="2018-04-30"), *entries) == ["before", "predicted"]
    assert len(left(Filters(), *entries)) == 4


@pytest.mark.parametrize("text", ["20180430", "2018-4-30", "2018", "30.4.2018", "2018-04-31", "abc", ""])
def test_texts_that_only_sort_like_dates_are_refused(text: str) -> None:
    """``2018-12-31`` comes before ``20180430`` in the order of letters."""
    with pytest.raises(ConfigError, match="max_release_date must be a date such as 2018-04-30"):
        left(Filters(max_release_date=text), entry("late", release_date="2018-12-31"))


def test_unresolved_chains_are_taken_and_structures_read_only_if_needed(tmp_path: Path) -> None:
    write(tmp_path / "half.pdb", pdb_text({"A": "MkVl"}))
    write(tmp_path / "index.tsv", "name\tsequence\nhalf\tMKVL\n")
    (half,) = open_dataset(tmp_path)
    known = entry("known", resolved=0.9)
    assert left(Filters(), half, entry("gone")) == ["half", "gone"]
    filtered = apply_filters([half, known, entry("gone")], Filters(min_resolved=0.5))
    assert [kept.id for kept in filtered.entries] == ["half", "known"]
    assert [name for name, _ in filtered.unreadable] == ["gone"]
    filtered = apply_filters([half, known], Filters(min_resolved=0.51))
    assert [kept.id for kept in filtered.entries] == ["known"]
    assert filtered.removed["resolved residues >= 0.51"] == 1


def test_alignment_rows_are_those_of_the_table_or_counted(tmp_path: Path) -> None:
    """With the query; of a complex every chain has to have them, and an invalid alignment is listed."""
    query = "MKVLAAGIT"
    write(tmp_path / "counted.a3m", a3m(query, query[::-1], query))
    write(tmp_path / "bad.a3m", "no alignment")
    counted, bad = (entry(name, query, alignment_dir=tmp_path) for name in ("counted", "bad"))
    shallow, deep = replace(entry("shallow"), msa_rows=2), replace(entry("deep"), msa_rows=3)
    filtered = apply_filters([counted, bad, shallow, deep], Filters(min_rows=3))
    assert [kept.id for kept in filtered.entries] == ["counted", "deep"]
    assert filtered.removed["alignment rows >= 3"] == 1
    assert [name for name, _ in filtered.unreadable] == ["bad"]
    whole = group_complexes(
        [replace(deep, structure=Path("a.pdb")), replace(shallow, structure=Path("a.pdb"))]
    )
    assert apply_filters(whole, Filters(min_rows=2)).entries == whole
    with pytest.raises(ConfigError, match=r"alignment rows >= 3: 1"):
        apply_filters(whole, Filters(min_rows=3))


def test_each_filter_counts_what_it_took() -> None:
    entries = [
        entry("fine"),
        entry("blurred", resolution=12.0),
        entry("poly", "G" * 30),
        entry("poly2", "A" * 30),
        entry("short", "MK"),
    ]
    filtered = apply_filters(entries, Filters(min_length=5, max_length=100))
    assert filtered.summary() == (
        "1 chains are left (resolution <= 9 Å took 1, single residue type <= 0.8 took 2, length >= 5 took 1)"
    )
    assert filtered.removed["length <= 100"] == 0


def test_nothing_left_is_an_error_that_counts() -> None:
    entries = [entry("blurred", resolution=12.0), entry("poly", "G" * 30), entry("poly2", "A" * 30)]
    with pytest.raises(ConfigError, match=r"all 3 \(resolution <= 9 Å: 1; single residue type <= 0.8: 2\)"):
        apply_filters(entries, Filters())
    with pytest.raises(ConfigError, match="contains no chain"):
        apply_filters([], Filters())
