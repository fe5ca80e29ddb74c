"""Files of restraints: formats, and one message for each line that cannot be used."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.prepare import _with_restraints
from fastfold.inference.restraints.file import CROSSLINKERS, read_restraints
from fastfold.inference.restraints.restraint import Restraint, grouped

TARGET = target_from_sequence("MKTAYIAKQR:GSHMAWLPE")


def write(folder: Path, text: str, name: str = "restraints.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_our_table(tmp_path: Path) -> None:
    text = "chain1,residue1,chain2,residue2,min,max,weight,group\nA,1,A,10,,8,,\nA,K2,B,3,4,12,0.5,x\nA,3,B,9,20,,,x\n"
    assert read_restraints(write(tmp_path, text), TARGET) == [
        Restraint(0, 9, 0.0, 8.0, 1.0, "", "line 2"),
        Restraint(1, 12, 4.0, 12.0, 0.5, "x", "line 3"),
        Restraint(2, 18, 20.0, math.inf, 1.0, "x", "line 4"),
    ]


def test_crosslinkers_have_their_limits(tmp_path: Path) -> None:
    text = "chain1;residue1;chain2;residue2;crosslinker\nA;2;A;8;dss\nA;2;B;9;EDC\n"
    found = read_restraints(write(tmp_path, text), TARGET)
    assert [one.high for one in found] == [CROSSLINKERS["DSS"], CROSSLINKERS["EDC"]]


def test_crosslink_tables_of_xiview(tmp_path: Path) -> None:
    text = "PepSeq1,Protein1,SeqPos1,Protein2,SeqPos2,Score,Crosslinker\nMK,A,2,B,9,11.5,DSSO\n"
    assert read_restraints(write(tmp_path, text), TARGET) == [Restraint(1, 18, 0.0, 30.0, 1.0, "", "line 2")]
    with pytest.raises(InputError, match="cross-links without a distance; add a column crosslinker"):
        read_restraints(write(tmp_path, "Protein1,AbsPos1,Protein2,AbsPos2,Score\nA,2,B,9,1\n"), TARGET)


@pytest.mark.parametrize("ending", ["csv", "yaml"])
def test_pockets_of_one_residue_with_other_limits_are_two(tmp_path: Path, ending: str) -> None:
    """Both must hold, in the tables of Chai and in Boltz' files."""
    path = tmp_path / f"r.{ending}"
    if ending == "csv":
        header = "chainA,res_idxA,chainB,res_idxB,connection_type,max_distance_angstrom\n"
        path.write_text(header + "".join(f"B,,A,R10,pocket,{high}\n" for high in (5, 20)))
    else:
        entry = "  - pocket: {{binder: B, contacts: [[A, 10]], max_distance: {}}}\n"
        path.write_text("constraints:\n" + entry.format(5) + entry.format(20))
    restraints = read_restraints(path, TARGET)
    near, far = grouped(restraints)
    assert {restraints[i].high for i in near} == {5.0}
    assert {restraints[i].high for i in far} == {20.0}
    assert len(near) == len(far) == len(TARGET.chains[1].sequence)


def test_chais_table(tmp_path: Path) -> None:
    text = (
        "restraint_id,chainA,res_idxA,chainB,res_idxB,connection_type,confidence,min_distance_angstrom,"
        "max_distance_angstrom,comment\n"
        "r0,A,K2,B,G1,contact,1.0,0.0,22.0,\nr1,B,,A,R10,pocket,1.0,0.0,7.0,\n"
    )
    found = read_restraints(write(tmp_path, text), TARGET)
    assert found[0] == Restraint(1, 10, 0.0, 22.0, 1.0, "", "line 2", "any")
    assert [one.first for one in found[1:]] == list(range(10, 19))
    assert {(one.second, one.high, one.group) for one in found[1:]} == {(9, 7.0, "pocket B/A/R10 0 to 7 Å")}


def test_boltzs_yaml(tmp_path: Path) -> None:
    text = (
        "constraints:\n  - contact: {token1: [A, 1], token2: [B, 2], max_distance: 6}\n"
        "  - pocket: {binder: B, contacts: [[A, 3], [A, 4]]}\n"
    )
    found = read_restraints(write(tmp_path, text, "input.yaml"), TARGET)
    assert found[0] == Restraint(0, 11, 0.0, 6.0, 1.0, "", "constraint 1", "any")
    assert len(found) == 1 + 2 * 9
    assert len({one.group for one in found[1:]}) == 2


def test_atoms_and_ambiguity_are_columns(tmp_path: Path) -> None:
    """Cross-links are ambiguous by default, other rows exact."""
    target = target_from_sequence("MKTAYIAKQR:MKTAYIAKQR")
    header = "chain1,residue1,chain2,residue2,max,crosslinker,atoms,ambiguous,group\n"
    rows = "A,1,B,5,8,,any,,\nA,1,B,5,8,,cb,yes,\nA,2,B,8,,DSS,,,\nA,2,B,8,,DSS,,no,\nA,2,A,8,,DSS,,,x\n"
    found = read_restraints(write(tmp_path, header + rows), target)
    lines = [
        [(one.first, one.second, one.atoms, one.group) for one in found if one.line == f"line {number}"]
        for number in range(2, 7)
    ]
    assert lines[0] == [(0, 14, "any", "")]
    assert lines[1] == [(a, b, "CB", "line 3") for a, b in ((0, 14), (0, 4), (10, 14), (10, 4))]
    assert lines[2] == [(a, b, "CA", "line 4") for a, b in ((1, 17), (1, 7), (11, 17), (11, 7))]
    assert lines[3] == [(1, 17, "CA", "")]
    assert lines[4] == [(a, b, "CA", "x") for a, b in ((1, 7), (1, 17), (11, 7), (11, 17))]


def test_crosslinks_name_proteins_and_are_ambiguous(tmp_path: Path) -> None:
    target = target_from_sequence("MKTAYIAKQR:MKTAYIAKQR")
    target = replace(target, chains=tuple(replace(chain, record="sp|P1|X") for chain in target.chains))
    text = "Protein1,SeqPos1,Protein2,SeqPos2,Score,Crosslinker\nP1,2,P1,8,11.5,DSSO\n"
    found = read_restraints(write(tmp_path, text), target)
    assert [(one.first, one.second) for one in found] == [(1, 7), (1, 17), (11, 7), (11, 17)]
    assert {one.group for one in found} == {"line 2"}


@pytest.mark.parametrize("separator", ["\t", ";", ","])
def test_tables_have_tabs_comments_and_empty_lines(tmp_path: Path, separator: str) -> None:
    text = "# from the paper, table 2\n\nchain1,residue1,chain2,residue2,max\n# A\nA,2,B,3,20\n\n A , K2 ,B,4,20\n"
    found = read_restraints(write(tmp_path, text.replace(",", separator)), TARGET)
    assert [(one.first, one.second, one.line) for one in found] == [(1, 12, "line 5"), (1, 13, "line 7")]


def test_chais_confidence_is_a_weight(tmp_path: Path) -> None:
    """An empty cell is a confidence of 1, and an empty limit one of 10 Å, as in Chai."""
    header = (
        "restraint_id,chainA,res_idxA,chainB,res_idxB,connection_type,confidence,min_distance_angstrom,"
        "max_distance_angstrom,comment\n"
    )
    found = read_restraints(
        write(tmp_path, f"{header}r0,A,K2,B,G1,contact,0.2,0.0,5.5,\nr1,A,K2,B,S2,contact,,,,\n"), TARGET
    )
    assert [(one.weight, one.low, one.high, one.atoms) for one in found] == [
        (0.2, 0.0, 5.5, "any"),
        (1.0, 0.0, 10.0, "any"),
    ]
    for row, message in (
        ("r0,A,K2,B,G1,contact,0,0,5.5,", "confidence: expected a number over 0, found 0; remove the row"),
        ("r0,A,K2,B,G1,contact,2,0,5.5,", "confidence: expected a number from 0 to 1, found 2"),
        (
            "r0,A,K2@NZ,B,G1,contact,1,0,5.5,",
            "atoms such as 'K2@NZ' are not supported; name the residue alone",
        ),
        (
            "r0,A,K2,B,G1,covalent,1,0,5.5,",
            "connection type 'covalent' is not supported; contact and pocket are",
        ),
        ("r0,A,K2,B,G1,pocket,1,0,5.5,", "res_idxA: a pocket is near any residue of chain A, found 'K2'"),
    ):
        with pytest.raises(InputError) as error:
            read_restraints(write(tmp_path, f"{header}{row}\n"), TARGET)
        assert f"line 2: {message}" in str(error.value)


def test_notes_reach_the_user(tmp_path: Path) -> None:
    notes: list[str] = []
    text = "constraints:\n  - contact: {token1: [A, 3], token2: [B, 4], force: true}\n"
    read_restraints(write(tmp_path, text, "input.yaml"), TARGET, say=notes.append)
    assert [note.partition(" is ")[0] for note in notes] == ["input.yaml: 'force' of constraint 1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("C,1,A,2,,8,,", "unknown chain 'C'; the target has A, B"),
        ("A,11,A,2,,8,,", "chain A has residues 1 to 10, found 11"),
        ("A,W2,A,3,,8,,", "residue 2 of chain A is K, found W2"),
        ("A,x,A,3,,8,,", "expected a residue number such as 10 or K10, found 'x'"),
        ("A,2,A,2,,8,,", "restrains a residue to itself"),
        ("A,2,A,3,,,,", "needs min, max or a crosslinker"),
        ("A,2,A,3,9,8,,", "min 9 is larger than max 8"),
        ("A,2,A,3,,-1,,", "max: expected a number from 0, found '-1'"),
        ("A,2,A,3,,nan,,", "max: expected a number from 0, found 'nan'"),
        ("A,2,A,3,,8,0,", "weight: expected a positive number"),
        ("A,2,A,3,,8,,,9", "has more cells than the header"),
    ],
)
def test_each_wrong_line_is_named(tmp_path: Path, row: str, message: str) -> None:
    header = "chain1,residue1,chain2,residue2,min,max,weight,group\n"
    with pytest.raises(InputError) as error:
        read_restraints(write(tmp_path, f"{header}A,1,A,10,,8,,\n{row}\n{row}\n"), TARGET)
    assert f"line 3: {message}" in str(error.value)
    assert f"line 4: {message}" in str(error.value)
    assert "line 2" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a,b\n1,2\n", "r.csv", "has no column 'chain1'"),
        ("chain1,residue1,chain2,residue2,max\n", "r.csv", "has no restraint"),
        ("chain1,residue1,chain2,residue2,maximum\n", "r.csv", "unknown column 'maximum'"),
        ("Chain1,Residue1,Chain2,Residue2,Max,Maximum\nA,1,B,2,8,9\n", "r.csv", "unknown column 'maximum'"),
        (
            "chain1,residue1,chain2,residue2,max,max\nA,1,B,2,8,9\n",
            "r.csv",
            "the column 'max' more than once",
        ),
        (
            "chain1,residue1,chain2,residue2,max,atoms\nA,1,B,2,8,N\n",
            "r.csv",
            "atoms: expected CA, CB, any, found 'N'",
        ),
        (
            "chain1,residue1,chain2,residue2,crosslinker,atoms\nA,1,B,2,DSS,any\n",
            "r.csv",
            "atoms: the limit of a crosslinker is between CA",
        ),
        (
            "chain1,residue1,chain2,residue2,max,ambiguous\nA,1,B,2,8,1\n",
            "r.csv",
            "ambiguous: expected yes or no, found '1'",
        ),
        (
            'chain1,residue1,chain2,residue2,max\n"A,1,B,2,8\n',
            "r.csv",
            "is not a table: .*; check the quotes",
        ),
        (
            "chain1,residue1,chain2,residue2,min\nA,1,A,2,50\n",
            "r.csv",
            "no structure meets:\nline 2: min 50 is too large",
        ),
        (
            "chain1,residue1,chain2,residue2,max\nA,1,A,9,0\n",
            "r.csv",
            "no structure meets:\nline 2: max 0 is too small",
        ),
        (
            "chain1,residue1,chain2,residue2,min,max\nA,1,B,9,30,\nA,1,B,9,,10\n",
            "r.csv",
            "line 2: min 30 contradicts max 10 of line 3",
        ),
        ("chain1,residue1,chain2,residue2,crosslinker\nA,1,A,2,XYZ\n", "r.csv", "unknown crosslinker 'XYZ'"),
        ("- 1\n", "r.yaml", "expected a list 'constraints'"),
        ("constraints: [{bond: {}}]\n", "r.yaml", "'bond' is not supported"),
        ("a: [\n", "r.yaml", "is not plain YAML"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_restraints(write(tmp_path, text, name), TARGET)


def test_targets_without_these_residues_are_refused_before_a_search(tmp_path: Path) -> None:
    path = write(tmp_path, "chain1,residue1,chain2,residue2,max\nA,1,B,9,8\n")
    short = target_from_sequence("MKTAYIAKQR:GSHM", "short")
    suitable, (error,) = _with_restraints(path, [TARGET, short])
    assert suitable == [TARGET]
    assert "line 2: chain B has residues 1 to 4, found 9" in str(error)
    assert str(error).startswith("short: ")
    assert error.record == "short"  # of its line in failures.tsv
