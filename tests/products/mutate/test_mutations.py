"""Mutants of a target: read by their names, and applied to the query's row alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa
from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError, InputError
from fastfold.products.mutate.mutations import mutant_targets, mutated_residues, read_variants


def names(text: str, mutations: str, positions: str | None = None) -> list[str]:
    """Names of the mutants."""
    return [
        "+".join(map(str, one)) for one in read_variants(target_from_sequence(text), mutations, positions)
    ]


def test_names_of_mutants(tmp_path: Path) -> None:
    """A file, a list and a scan; copies of a chain are mutated together unless one is named."""
    path = tmp_path / "mutants.txt"
    path.write_text("# comment\nM1A\n\nK2R + M1G # two\nM1A\n")
    assert names("MKV", str(path)) == ["M1A", "M1G+K2R"]
    assert names("MKV", "V3A,K2A") == ["V3A", "K2A"]
    assert names("MK:MK", "K2A,B:K2A") == ["K2A", "B:K2A"]
    assert names("MK:W", "B:W1A") == ["B:W1A"]
    assert names("MUK", "U2C,X2A") == ["U2C", "X2A"]
    scan = names("MXK", "all")
    assert len(scan) == 38
    assert scan[0] == "M1A"
    assert "K3K" not in scan
    assert names("MK:W:MK", "all", "A:2,B:1")[:2] == ["AC:K2A", "AC:K2C"]
    assert len(names("MK:W:MK", "all")) == 57


def test_copies_are_named_as_in_the_table_of_results() -> None:
    assert names("MK:W:MK", "AC:K2A,A:K2A") == ["AC:K2A", "A:K2A"]
    with pytest.raises(InputError, match="no chain 'AB'"):
        names("MK:W:MK", "AB:K2A")


def test_commas_separate_mutants_of_a_list_and_join_mutations_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mutants.txt"
    path.write_text("M1A,K2A\nM1A K2R\n")
    assert names("MKV", "M1A,K2A") == ["M1A", "K2A"]
    assert names("MKV", str(path)) == ["M1A+K2A", "M1A+K2R"]


def test_a_list_may_be_longer_than_a_file_s_name() -> None:
    residues = "ACDEFGHIKLMNPQRSTVW"
    scan = ",".join(f"Y{number}{residue}" for number in range(1, 6) for residue in residues)
    assert len(scan) > 255
    assert names("YYYYY", scan) == scan.split(",")


@pytest.mark.parametrize(
    ("text", "mutations", "message"),
    [
        ("MKV", "K1A", "residue 1 is M, not K"),
        ("MUV", "K2A", "residue 2 is U, not K"),
        ("MKV", "M9A", "no residue 9; its residues are 1 to 3"),
        ("MKV", "M1X", "X is not one of the 20"),
        ("MKV", "M1M", "is M already"),
        ("MKV", "B:M1A", "no chain 'B'"),
        ("MK:W", "M1A", "name one, as in A:M1A"),
        ("MKV", "M1A+M1G", "changes a residue twice"),
        ("MKV", "nothing.txt", "no such file"),
    ],
)
def test_mutations_that_do_not_fit_are_refused(text: str, mutations: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        names(text, mutations)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mutants.txt"
    path.write_text("M1A\nW7\n")
    with pytest.raises(InputError, match=r"mutants.txt.*2.*expected a mutation such as A24G"):
        names("MKV", str(path))
    path.write_text("# none\n")
    with pytest.raises(InputError, match="contains no mutation"):
        names("MKV", str(path))
    for positions in ("7", "x", "3-2", "1,3-1"):
        with pytest.raises(ConfigError, match="positions="):
            names("MKV", "all", positions)
    with pytest.raises(ConfigError, match="positions= chooses"):
        names("MKV", "M1A", "1")


def test_a_scan_without_a_known_residue_is_refused() -> None:
    assert names("MXV", "all", "2-3")[0] == "V3A"
    for text, positions in (("MXV", "2"), ("XX", None)):
        with pytest.raises(InputError, match=r"^no mutation: all of the residues are unknown"):
            names(text, "all", positions)


def test_the_query_row_alone_changes() -> None:
    """Other rows, also those of the wild type's letters, and chains without the mutation stay."""
    target = target_from_sequence("MBV:WW", "x")
    msa = Msa(("MXV", "MKV", "MXV"), np.zeros((3, 3), np.int32), ("q", "r", "s"))
    other = Msa(("WW", "WA"), np.zeros((2, 2), np.int32), ("q", "r"))
    variants = read_variants(target, "A:V3L,A:M1A+B:W2K")
    one, two = mutant_targets(target, [([msa], []), ([], [other])], variants)
    assert (one.name, two.name) == ("x_A-V3L", "x_A-M1A+B-W2K")
    assert [chain.sequence for chain in two.chains] == ["AXV", "WK"]
    assert two.chains[0].letters == "ABV"
    assert one.alignments is not None
    assert two.alignments is not None
    assert one.alignments[0][0][0].sequences == ("MBL", "MKV", "MXV")
    assert one.alignments[1][1][0] is other
    assert two.alignments[1][1][0].sequences == ("WK", "WA")
    assert mutated_residues(target, variants[1]).tolist() == [0, 4]


@pytest.mark.parametrize("header", ["mutation", "mutant\tscore", "Mutant;Score", "# note\nmutant,DMS_score"])
def test_the_header_of_a_table_is_named_with_what_to_do(tmp_path: Path, header: str) -> None:
    path = tmp_path / "mutants.tsv"
    path.write_text(f"{header}\nM1A\n")
    with pytest.raises(
        InputError, match=r"found the header of a table .*; remove it, and all columns but"
    ) as found:
        read_variants(target_from_sequence("MKV"), str(path))
    assert found.value.line == 1 + header.count("\n")
