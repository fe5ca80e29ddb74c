"""Files of restraints: formats, and one message for each line that cannot be used."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.restraints.file import CROSSLINKERS, read_restraints
from fastfold.inference.restraints.restraint import Restraint

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


def test_chais_table(tmp_path: Path) -> None:
    text = (
        "restraint_id,chainA,res_idxA,chainB,res_idxB,connection_type,confidence,min_distance_angstrom,"
        "max_distance_angstrom,comment\n"
        "r0,A,K2,B,G1,contact,1.0,0.0,22.0,\nr1,B,,A,R10,pocket,1.0,0.0,7.0,\n"
    )
    found = read_restraints(write(tmp_path, text), TARGET)
    assert found[0] == Restraint(1, 10, 0.0, 22.0, 1.0, "", "line 2", "any")
    assert [one.first for one in found[1:]] == list(range(10, 19))
    assert {(one.second, one.high, one.group) for one in found[1:]} == {(9, 7.0, "pocket B/A/R10")}


def test_boltzs_yaml(tmp_path: Path) -> None:
    text = (
        "constraints:\n  - contact: {token1: [A, 1], token2: [B, 2], max_distance: 6}\n"
        "  - pocket: {binder: B, contacts: [[A, 3], [A, 4]]}\n"
    )
    found = read_restraints(write(tmp_path, text, "input.yaml"), TARGET)
    assert found[0] == Restraint(0, 11, 0.0, 6.0, 1.0, "", "constraint 1", "any")
    assert len(found) == 1 + 2 * 9
    assert len({one.group for one in found[1:]}) == 2


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
        ("chain1,residue1,chain2,residue2,crosslinker\nA,1,A,2,XYZ\n", "r.csv", "unknown crosslinker 'XYZ'"),
        ("- 1\n", "r.yaml", "expected a list 'constraints'"),
        ("constraints: [{bond: {}}]\n", "r.yaml", "'bond' is not supported"),
        ("a: [\n", "r.yaml", "is not YAML"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_restraints(write(tmp_path, text, name), TARGET)
