"""Hits of MMseqs2 lead to the templates of ColabFold's ``--pdb-hit-file``, whose functions ran on the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.msa.msa import parse_a3m
from fastfold.data.search.programs import find_program
from fastfold.data.targets import target_from_sequence
from fastfold.data.templates.database import MmcifFolder
from fastfold.data.templates.hit_table import read_hit_chains, read_hit_table, write_sequence_database
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.source import TemplateFinder
from fastfold.errors import ConfigError, InputError
from tests.helpers.template_files import FAMILY, HOMOLOGUE, QUERY, entry, write_entries

HITS = "101\t1abc_A\t0.5\n101\t2abc_C\t0.5\n102\t3abc_A\t0.5\n"
# ColabFold (master of 2026-07-24, mk_hhsearch_db): its file pdb70_a3m.ffdata, with the entries in its folder's order.
COLABFOLD_DATA = (
    ">3abc_A\nGSGSGSGSGSGSGSGSGSGS\n\0>1abc_A\nSAYIARQRNISFVKAHFTRQLEDRLGLVEVQAPILTKVXXXX\n\0"
    ">1abc_B\nKQRQISFVKSHFSRQLEERLGLIEVQAP\n\0>2abc_C\nMKSSYISRQRNISFVKSHFTRQLEDRLGLVEVQSPILTKV\n\0"
)
# ColabFold's mk_template with HH-suite 3.3.0 and AlphaFold's featurizer: letters, sum of probabilities, atoms.
COLABFOLD_TEMPLATES = {
    "2abc_C": ("MKSSYISRQRNISFVKSHFTRQLEDRLGLVEVQSPILTKV", 39.3, 160),
    "1abc_A": ("--SAYIARQRNISFVKAHFTRQLEDRLGLVEVQAPILTKV", 36.9, 152),
    "1abc_B": ("-------KQRQISFVKSHFSRQLEERLGLIEVQAP-----", 27.2, 112),
}
needs_hhsearch = pytest.mark.skipif(find_program("hhsearch") is None, reason="hhsearch is not installed")


def with_others(text: str, chain: str) -> str:
    """An entry with three waters, a ligand with an insertion code, and a modified residue in a chain."""
    rows = [f"HETATM O . HOH W 9 . ? {k}.0 50.0 60.0 1.00 20.00 {900 + k} {chain} 1" for k in range(3)]
    rows.append(f"HETATM C . LIG V 9 . A 1.0 50.0 61.0 1.00 20.00 950 {chain} 1")
    rows.append(f"HETATM SE . MSE V 9 . ? 1.0 50.0 62.0 1.00 20.00 951 {chain} 1")
    return "\n".join([text.rstrip("#\n"), *rows, "#", ""])


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    first = with_others(entry({"A": HOMOLOGUE, "B": QUERY[5:35]}, missing=[1, 2]), "A")
    others = {"2abc": entry({"C": FAMILY[3]}), "3abc": entry({"A": "GS" * 10})}
    return write_entries(tmp_path / "mmcif", {"1abc": first, **others})


def test_first_hits_of_each_query_count(tmp_path: Path) -> None:
    """Twenty lines of each, as ColabFold; an entry occurs once."""
    lines = [f"101\t{n}abc_A\t1e-5" for n in (1, 1, 2)] + [f"101\t1a{n}_A" for n in range(10, 40)]
    (tmp_path / "x.m8").write_text("\n".join([*lines, "102\t9ABC\t1", ""]))
    expected = ["1abc", "2abc", *(f"1a{n}" for n in range(10, 27)), "9abc"]
    assert read_hit_table(tmp_path / "x.m8") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no hits"),
        ("101\t1abc_A\n102 2abc_A\n", r"x\.m8:2: expected a line of MMseqs2's hits"),
        ("101\tUniRef100_A\n", r"x\.m8:1: expected a line"),
        ("101\t1abcde\n", r"x\.m8:1: expected a line"),
    ],
)
def test_other_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.m8").write_text(text)
    with pytest.raises(InputError, match=message):
        read_hit_table(tmp_path / "x.m8")


def test_the_database_is_that_of_colabfold(tmp_path: Path, entries: Path) -> None:
    (tmp_path / "obsolete.dat").write_text(
        "OBSLTE    31-JUL-94 4OLD     5OLD\nOBSLTE    31-JUL-94 5OLD     1ABC\n"
    )
    (entries / "6bad.cif").write_text("data_x\nloop_\n")
    chains, left_out = read_hit_chains(["3abc", "4old", "2abc", "7abc", "6bad"], MmcifFolder(entries))
    write_sequence_database(chains, tmp_path / "pdb70")
    assert (tmp_path / "pdb70_a3m.ffdata").read_text() == COLABFOLD_DATA
    index = "1000000\t0\t30\n1000001\t30\t52\n1000002\t82\t38\n1000003\t120\t50\n"
    assert (tmp_path / "pdb70_a3m.ffindex").read_text() == index
    assert [(one.name, one.reason) for one in left_out] == [("7abc", "missing file"), ("6bad", "unreadable")]


@needs_hhsearch
def test_templates_are_those_of_colabfold(tmp_path: Path, entries: Path) -> None:
    (tmp_path / "hits.m8").write_text(HITS + "102\t9abc_A\n")
    finder = TemplateFinder(TemplateOptions(hits=tmp_path / "hits.m8", mmcif_dir=entries))
    msa = parse_a3m(f">q\n{QUERY}\n>a\n{FAMILY[2]}\n>b\n{FAMILY[4]}\n")
    (found,) = finder.find(target_from_sequence(QUERY), [([msa], [])])
    ours = {one.name: (one.sequence, round(one.sum_probs, 1), int(one.mask.sum())) for one in found.templates}
    assert ours == COLABFOLD_TEMPLATES
    assert list(ours) == list(COLABFOLD_TEMPLATES)
    assert found.sources == ("hits.m8",)
    assert [one.name for one in found.outcomes if one.reason == "missing file"] == ["9abc"]


def test_hits_need_structures_and_hhsearch(
    tmp_path: Path, entries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = tmp_path / "hits.m8"
    hits.write_text(HITS)
    with pytest.raises(ConfigError, match=r"TemplateOptions\.hits needs TemplateOptions\.mmcif_dir=DIR"):
        TemplateOptions(hits=hits)
    with pytest.raises(
        ConfigError, match=r"TemplateOptions\.hits has the hits that TemplateOptions\.database searches for"
    ):
        TemplateOptions(hits=hits, mmcif_dir=entries, database=hits)
    monkeypatch.setattr("fastfold.data.templates.source.find_program", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"TemplateOptions\.hits aligns the entries by hhsearch, which is not installed"
    ):
        TemplateFinder(TemplateOptions(hits=hits, mmcif_dir=entries))
