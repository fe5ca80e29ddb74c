"""Which hits become templates, and what is said of the others."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.features import find_chain, map_to_sequence
from fastfold.data.templates.hits import TemplateSkipped, parse_hhr, parse_hmmsearch
from fastfold.data.templates.select import ChainTemplates, check_hit, choose_templates
from fastfold.protein import residue_constants as rc
from tests.helpers.template_files import HOMOLOGUE, QUERY, entry, hhr, position, sto, write_entries

CA = rc.atom_order["CA"]


@pytest.fixture
def entries(tmp_path: Path) -> MmcifFolder:
    folder = write_entries(
        tmp_path / "mmcif",
        {
            "1abc": entry({"A": "GS" + HOMOLOGUE, "B": QUERY}),
            "1new": entry({"A": HOMOLOGUE}, dates=("2022-01-01",)),
            "1odd": entry({"A": HOMOLOGUE[:20] + "X" + HOMOLOGUE[21:]}),
            "1far": entry({"A": HOMOLOGUE}, shift={30: 200.0}),
            "1few": entry({"A": HOMOLOGUE}, missing=range(2, 41)),
            "1non": entry({"A": HOMOLOGUE}).replace("'L-peptide linking'", "'RNA linking'"),
            "1oth": entry({"A": "W" * 40}),
            "1mut": entry({"A": "GS" + HOMOLOGUE[:20] + "WW" + HOMOLOGUE[22:] + "GG"}),
        },
    )
    (folder / "obsolete.dat").write_text("OBSLTE    31-JUL-94 1OLD     1ABC\nOBSLTE    31-JUL-94 1BAD\n")
    return MmcifFolder(folder)


def chosen(entries: MmcifFolder, rows: dict[str, str], **settings: object) -> ChainTemplates:
    return choose_templates(parse_hmmsearch(sto(rows), QUERY), QUERY, entries, **settings)  # type: ignore[arg-type]


def test_atoms_stand_at_the_residues_that_they_are_aligned_with(entries: MmcifFolder) -> None:
    row = HOMOLOGUE[:10] + "-" + HOMOLOGUE[11:20] + "ws" + HOMOLOGUE[20:]
    entries.folder.joinpath("1ins.cif").write_text(entry({"A": row.replace("-", "").upper()}))
    found = chosen(entries, {"1abc_A/3-42": HOMOLOGUE, "1ins_A/1-41": row})
    features = found.features()
    assert {name: value.shape for name, value in features.items()} == {
        "template_aatype": (2, 40, 22),
        "template_all_atom_positions": (2, 40, 37, 3),
        "template_all_atom_masks": (2, 40, 37),
        "template_sum_probs": (2, 1),
        "template_domain_names": (2,),
        "template_sequence": (2,),
    }
    positions = features["template_all_atom_positions"][:, :, CA]
    np.testing.assert_allclose(positions[0, 7], position(10, "CA"), atol=1e-3)
    np.testing.assert_allclose(positions[1, 9], position(10, "CA"), atol=1e-3)
    np.testing.assert_allclose(positions[1, 30], position(32, "CA"), atol=1e-3)
    assert features["template_all_atom_masks"][1, 10].sum() == 0
    assert features["template_aatype"][1, 10].argmax() == 21
    assert features["template_aatype"][1, 9].argmax() == rc.hhblits_letter_to_id[HOMOLOGUE[9]]
    assert found.templates[1].sequence == HOMOLOGUE[:10] + "-" + HOMOLOGUE[11:]


def test_every_hit_that_is_left_out_has_its_reason(entries: MmcifFolder) -> None:
    short = "-" * 31 + HOMOLOGUE[31:]
    cases = {
        "1abc_A/3-42": (HOMOLOGUE, "used", ""),
        "1old_A/3-42": (HOMOLOGUE, "repeated", "repeats the letters of a template"),
        "1bad_A/1-40": (HOMOLOGUE, "withdrawn", "withdrawn"),
        "1abc_B/1-40": (QUERY, "duplicate", "it is 100.0% of the query, more than 95%"),
        "1new_A/1-40": (HOMOLOGUE, "late", "released on 2022-01-01, after 2021-11-01"),
        "1far_A/1-40": (HOMOLOGUE, "broken", "residues 29 and 30 of its chain are 197 Å apart"),
        "1few_A/1-40": (HOMOLOGUE, "no atoms", "the aligned part has 4 atoms, fewer than 5"),
        "1non_A/1-40": (HOMOLOGUE, "no chains", "its file contains no protein chain"),
        "1oth_Z/1-40": (HOMOLOGUE, "not found", "its file lacks the protein chain 'Z', and has A"),
        "1oth_A/1-40": (HOMOLOGUE, "other sequence", "of the residues are equal, expected at least 90%"),
        "1zzz_A/1-40": (HOMOLOGUE, "missing file", "1zzz.cif and 1zzz.cif.gz are missing"),
        "123_A/1-40": (HOMOLOGUE, "name", "does not begin with a PDB id and a chain"),
        "2abc_A/32-40": (short, "short", "it has 9 residues, fewer than 10"),
        "3abc_A/38-40": ("-" * 37 + HOMOLOGUE[37:], "coverage", "aligned with 7.5% of the query"),
    }
    found = chosen(entries, {name: row for name, (row, *_) in cases.items()}, max_date=date(2021, 11, 1))
    assert [outcome.reason for outcome in found.outcomes] == [reason for _, reason, _ in cases.values()]
    for outcome, (_, _, message) in zip(found.outcomes, cases.values(), strict=True):
        assert message in outcome.message
    assert found.examined == len(cases)
    report = found.report()
    assert [one["name"] for one in report["used"]] == ["1abc_A"]
    assert len(report["left_out"]) == len(cases) - 1
    assert found.describe().startswith("1 used of 14 found: 1abc_A; left out: 1abc_A (it repeats")
    assert found.describe().endswith("and 10 more")


def test_unknown_residues_of_the_file_match_any_letter(entries: MmcifFolder) -> None:
    found = chosen(entries, {"1odd_A/1-40": HOMOLOGUE})
    assert found.templates[0].exact
    assert found.templates[0].sequence == HOMOLOGUE
    assert find_chain(entries.entry("1abc"), "Z", QUERY) == ("B", 0)
    assert find_chain(entries.entry("1abc"), "A", "WWWW") is None


def test_a_hit_with_another_sequence_is_aligned_anew(entries: MmcifFolder) -> None:
    """What has no counterpart has no atoms; the official program gives it those of the last residue."""
    (template,) = chosen(entries, {"1mut_A/1-40": HOMOLOGUE}).templates
    assert not template.exact
    assert template.sequence == HOMOLOGUE[:20] + "WW" + HOMOLOGUE[22:]
    np.testing.assert_allclose(template.positions[7, CA], position(10, "CA"), atol=1e-3)
    longer = HOMOLOGUE[:20] + "WWWW" + HOMOLOGUE[20:]
    mapping = map_to_sequence(longer, HOMOLOGUE, name="x")
    assert [mapping[place] for place in (0, 19, 24, 43)] == [0, 19, 20, 39]
    assert not {20, 21, 22, 23} & set(mapping)


def test_hhsearch_hits_are_taken_by_their_probabilities(entries: MmcifFolder) -> None:
    """And none is left out because it repeats a template, as in AlphaFold."""
    hits = [("1ODD_A one", QUERY, HOMOLOGUE, 20.0), ("1ABC_A two", QUERY, HOMOLOGUE, 35.0)]
    hits.append(("1NEW_A three", QUERY, HOMOLOGUE, 20.0))
    found = choose_templates(parse_hhr(hhr(hits), QUERY), QUERY, entries)
    assert [template.name for template in found.templates] == ["1abc_A", "1odd_A", "1new_A"]
    np.testing.assert_array_equal(found.features()["template_sum_probs"], [[35.0], [20.0], [20.0]])
    one = choose_templates(parse_hhr(hhr(hits), QUERY), QUERY, entries, max_templates=1)
    assert len(one.templates) == len(one.outcomes) == 1
    more = choose_templates(parse_hhr(hhr(hits), QUERY), QUERY, entries, earlier=one.templates)
    assert {outcome.reason for outcome in more.outcomes} == {"repeated"}
    both = one + more
    assert (len(both.templates), both.examined) == (1, 6)


def test_a_listed_date_spares_reading_the_entry(entries: MmcifFolder) -> None:
    (hit,) = parse_hmmsearch(sto({"1zzz_A/1-40": HOMOLOGUE}), QUERY)
    limit = date(2021, 11, 1)
    check_hit(hit, QUERY, released=limit, limit=limit)
    with pytest.raises(TemplateSkipped, match="released on 2021-11-02, after 2021-11-01"):
        check_hit(hit, QUERY, released=date(2021, 11, 2), limit=limit)
    entries.release_dates["1zzz"] = date(2021, 11, 2)
    (outcome,) = chosen(entries, {"1zzz_A/1-40": HOMOLOGUE}, max_date=limit).outcomes
    assert outcome.reason == "date"


def test_an_entry_without_a_date_is_used_only_without_a_limit(entries: MmcifFolder) -> None:
    text = entry({"A": HOMOLOGUE}).replace("2010-03-04", "?")
    entries.folder.joinpath("1und.cif").write_text(text)
    assert chosen(entries, {"1und_A/1-40": HOMOLOGUE}).outcomes[0].used
    assert (
        chosen(entries, {"1und_A/1-40": HOMOLOGUE}, max_date=date(2021, 1, 1)).outcomes[0].reason == "no date"
    )


def test_without_hits_there_is_nothing() -> None:
    nothing = ChainTemplates()
    assert nothing.features() == {}
    assert nothing.describe() == "none found"
