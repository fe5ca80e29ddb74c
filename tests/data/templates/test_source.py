"""Where a target's templates come from: structures, hits among its alignments, a database; and the profile for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa, parse_a3m
from fastfold.data.queries.pairs import read_complexes
from fastfold.data.targets import target_from_sequence
from fastfold.data.templates import source
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.source import TemplateFinder, parts_of, profile_msa
from fastfold.errors import ConfigError, InputError
from tests.helpers.template_files import FAMILY, HOMOLOGUE, QUERY, entry, hhr, sto, write_entries

NOTHING: list = [([], [])]


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    return write_entries(
        tmp_path / "mmcif", {"1abc": entry({"A": HOMOLOGUE}), "2abc": entry({"A": FAMILY[2]})}
    )


def test_structures_come_before_hits_and_hits_fill_the_rest(tmp_path: Path, entries: Path) -> None:
    own = tmp_path / "own.cif"
    own.write_text(entry({"A": HOMOLOGUE}))
    hits = tmp_path / "msas" / "query" / "pdb_hits.sto"
    hits.parent.mkdir(parents=True)
    hits.write_text(sto({"1abc_A/1-40": HOMOLOGUE, "2abc_A/1-40": FAMILY[2]}))
    target = target_from_sequence(QUERY)
    finder = TemplateFinder(TemplateOptions(structures=(own,), mmcif_dir=entries))
    (found,) = finder.find(target, NOTHING, tmp_path / "msas")
    assert [template.name for template in found.templates] == ["own_A", "2abc_A"]
    assert [outcome.reason for outcome in found.outcomes] == ["used", "repeated", "used"]
    assert found.sources == ("given structures", "pdb_hits.sto")
    one = TemplateFinder(TemplateOptions(structures=(own,), mmcif_dir=entries, max_templates=1))
    assert [t.name for t in one.find(target, NOTHING, tmp_path / "msas")[0].templates] == ["own_A"]


def test_equal_chains_of_a_complex_share_what_is_found(tmp_path: Path, entries: Path) -> None:
    """AlphaFold-Multimer's folders, HHsearch's hits, and a chain without any."""
    folder = tmp_path / "msas" / "query" / "msas" / "A"
    folder.mkdir(parents=True)
    (folder / "pdb70_hits.hhr").write_text(hhr([("1ABC_A", QUERY, HOMOLOGUE, 30.0)]))
    target = target_from_sequence(f"{QUERY}:{HOMOLOGUE}:{QUERY}")
    finder = TemplateFinder(TemplateOptions(mmcif_dir=entries))
    first, second, third = finder.find(target, NOTHING * 3, tmp_path / "msas")
    assert first is third
    assert [template.name for template in first.templates] == ["1abc_A"]
    assert second.describe() == "none found"


def test_a_profile_database_is_searched_by_hhsearch(
    tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pdb70_hhm.ffdata").touch()
    options = TemplateOptions(database=tmp_path / "pdb70", mmcif_dir=entries)
    monkeypatch.setattr(source, "find_program", lambda name: None)
    with pytest.raises(ConfigError, match="pdb70 is an HH-suite database, and hhsearch is not installed"):
        TemplateFinder(options)
    monkeypatch.setattr(source, "find_program", lambda name: "hhsearch")
    asked = []

    def search(msa: Msa, databases: list[Path]) -> str:
        asked.append((msa.sequences, databases))
        return hhr([("2ABC_A", QUERY, FAMILY[2], 30.0)])

    monkeypatch.setattr(source, "hhsearch", search)
    finder = TemplateFinder(options)
    for _ in range(2):  # the second time from what was found before
        (found,) = finder.find(target_from_sequence(QUERY), NOTHING)
        assert [template.name for template in found.templates] == ["2abc_A"]
    assert asked == [((QUERY,), [tmp_path / "pdb70"])]
    msa = parse_a3m(f">q\n{QUERY}\n>r\n{HOMOLOGUE}\n")
    finder.find(target_from_sequence(QUERY), [([msa], [])])  # another alignment is another search
    assert asked[1:] == [((QUERY, HOMOLOGUE), [tmp_path / "pdb70"])]


def test_a_part_has_templates_that_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A structure and two hits end before residue 21; the database is searched once for all parts of a protein."""
    gaps = "-" * 20
    halves = {"1abc": HOMOLOGUE[:20], "2abc": FAMILY[2][:20], "3abc": FAMILY[3][20:]}
    folder = write_entries(tmp_path / "mmcif", {name: entry({"A": half}) for name, half in halves.items()})
    own = tmp_path / "own.cif"
    own.write_text(entry({"A": QUERY[:20]}))
    rows = {f"{name}_A/1-20": gaps + half if name == "3abc" else half + gaps for name, half in halves.items()}
    searches: list[Msa] = []

    def search(msa: Msa, database: Path, *, say: Callable[[str], None]) -> str:
        searches.append(msa)
        return sto(rows)

    monkeypatch.setattr(source, "hmmsearch", search)
    database = tmp_path / "pdb_seqres.txt"
    database.touch()
    options = TemplateOptions(structures=(own,), mmcif_dir=folder, database=database, max_templates=2)
    finder = TemplateFinder(options)
    protein = target_from_sequence(QUERY, "P")
    lines = tmp_path / "parts.txt"
    lines.write_text("P\nP:21-40\nP:11-25\n")
    names, reports = [], []
    for target in read_complexes(lines, [protein])[0]:
        (chosen,) = finder.find(target, NOTHING)
        names.append([template.name for template in chosen.templates])
        reports.append(chosen.report(parts_of(target.chains[0])))
    assert names == [["own_A", "1abc_A"], ["3abc_A"], ["own_A", "1abc_A"]]
    assert len(searches) == 1
    aligned = [[one["aligned_residues"] for one in report["used"]] for report in reports]
    assert aligned[1:] == [[20], [10, 10]]
    message = "it has 0 atoms in the parts of the chain, fewer than 5"
    assert [one["reason"] for one in reports[1]["left_out"]] == [message] * 3


def test_damaged_hits_are_an_error_and_not_nothing(tmp_path: Path, entries: Path) -> None:
    hits = tmp_path / "msas" / "query" / "pdb_hits.hhr"
    hits.parent.mkdir(parents=True)
    hits.write_text("nonsense")
    with pytest.raises(InputError, match=r"pdb_hits\.hhr: expected HHsearch's output"):
        TemplateFinder(TemplateOptions(mmcif_dir=entries)).find(
            target_from_sequence(QUERY), NOTHING, tmp_path / "msas"
        )


def test_the_profile_is_that_of_the_first_alignment() -> None:
    """With the query on top, and without rows that have no residue."""
    msa = parse_a3m(f">q\n{QUERY}\n>empty\n{'-' * 40}\n>r\n{HOMOLOGUE}\n")
    assert profile_msa(QUERY, ([msa], [])).sequences == (QUERY, HOMOLOGUE)
    assert profile_msa(QUERY, ([], [msa])).sequences == (QUERY,)
    gaps = Msa(("-" * 40, HOMOLOGUE), np.zeros((2, 40), np.int32), ("q", "r"), as_is=True)
    found = profile_msa(QUERY, ([gaps], []))
    assert (found.sequences, found.descriptions) == ((QUERY, HOMOLOGUE), ("query", "r"))
    assert found.deletions.shape == (2, 40)
