"""Queries of OpenFold 3: a target for each, with the alignments that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.data.features.assembly import multimer_features
from fastfold.data.msa.find import load_alignments
from fastfold.data.queries.jobs import UNUSED_HITS
from fastfold.data.queries.openfold3 import QUERIES, parse_openfold3
from fastfold.data.queries.read import read_targets
from fastfold.data.queries.records import QueryFile
from fastfold.data.targets import Target
from fastfold.errors import InputError

FIRST, SECOND = "MKTAYIAK", "GSHMAW"
OWN = {FIRST: f">q\n{FIRST}\n>1\nMKTAYIAR\n>2\nMKTaaAYIWK\n", SECOND: f">q\n{SECOND}\n>1\nGS--AW\n"}
SPECIES = {
    FIRST: f">q\n{FIRST}\n>tr|A0A002|A0A002_MOUSE/1-8\nMRTAYIAK\n",
    SECOND: f">q\n{SECOND}\n>tr|B0A001|B0A001_MOUSE/1-6\nGSHLAW\n",
}
LINES = {
    FIRST: f">q\n{FIRST}\n>x\nMKTAYIAA\n>y\n--------\n",
    SECOND: f">q\n{SECOND}\n>x\nGSHMAA\n>y\nGSHWWW\n",
}


def chain(sequence: str, ids: Any = "A", **fields: Any) -> dict[str, Any]:
    return {"molecule_type": "protein", "chain_ids": ids, "sequence": sequence, **fields}


def read(folder: Path, *chains: dict[str, Any], **fields: Any) -> tuple[list[Target], list[InputError]]:
    tree = {"queries": {"t": {"chains": list(chains), **fields}}}
    (folder / "in.json").write_text(json.dumps(tree))
    return read_targets([folder / "in.json"])


def single(folder: Path, *chains: dict[str, Any], **fields: Any) -> Target:
    (target,), errors = read(folder, *chains, **fields)
    assert not errors, errors
    return target


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of alignments by chain."""
    for name, sequence in (("A", FIRST), ("B", SECOND)):
        (tmp_path / "t" / name).mkdir(parents=True)
        (tmp_path / "t" / name / "bfd_uniref_hits.a3m").write_text(OWN[sequence])
        (tmp_path / "t" / name / "uniprot_hits.a3m").write_text(SPECIES[sequence])
        (tmp_path / f"{name}_paired.a3m").write_text(LINES[sequence])
    return tmp_path


def test_each_query_is_a_target(tmp_path: Path) -> None:
    tree = {
        "queries": {"one": {"chains": [chain("MK", ["A", "B"])]}, "two": {"chains": [chain("MV")]}},
        "seeds": [4],
    }
    (tmp_path / "in.json").write_text(json.dumps(tree))
    targets, errors = read_targets([tmp_path / "in.json"])
    assert not errors
    assert [(one.record, [c.record for c in one.chains]) for one in targets] == [
        ("one", ["A", "B"]),
        ("two", ["A"]),
    ]
    assert [one.seeds for one in targets] == [(4,), (4,)]
    assert all(one.alignments is None for one in targets)


@pytest.mark.parametrize("as_folder", [True, False])
def test_main_alignments_equal_a_folder_of_alignments(files: Path, *, as_folder: bool) -> None:
    """Files and folders; the UniProt search pairs chains by species."""
    places = [f"t/{name}" for name in "AB"]
    if not as_folder:
        places = [[f"{place}/{name}_hits.a3m" for name in ("uniprot", "bfd_uniref")] for place in places]  # type: ignore[misc]
    target = single(
        files,
        chain(FIRST, "A", main_msa_file_paths=places[0]),
        chain(SECOND, "B", main_msa_file_paths=places[1]),
    )
    theirs = load_alignments(files, target)
    found, expected = (
        multimer_features(target.chains, list(one)) for one in (target.alignments or (), theirs)
    )  # type: ignore[arg-type]
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)
    assert [len(group) for group in theirs[0]] == [1, 1]


def test_paired_rows_belong_together_by_number(files: Path) -> None:
    """As in an alignment of ColabFold with the same rows."""
    target = single(
        files,
        chain(
            FIRST, "A", main_msa_file_paths="t/A/bfd_uniref_hits.a3m", paired_msa_file_paths="A_paired.a3m"
        ),
        chain(
            SECOND, "B", main_msa_file_paths="t/B/bfd_uniref_hits.a3m", paired_msa_file_paths=["B_paired.a3m"]
        ),
    )
    (files / "c").mkdir()
    text = (
        f"#8,6\t1,1\n>q\tq\n{FIRST}{SECOND}\n>x\tx\nMKTAYIAAGSHMAA\n>q\n{FIRST}------\n>1\nMKTAYIAR------\n"
    )
    text += f">2\nMKTaaAYIWK------\n>q\n--------{SECOND}\n>1\n--------GS--AW\n"
    (files / "c" / "t.a3m").write_text(text)
    theirs = load_alignments(files / "c", target)
    ours = list(target.alignments or ())
    found, expected = (multimer_features(target.chains, one) for one in (ours, theirs))  # type: ignore[arg-type]
    # A line with a gap in one chain is such a line here, and a row of the other chain alone in ColabFold.
    line = [tuple(row) for row in found["msa"][:3]]
    np.testing.assert_array_equal(found["msa"][:2], expected["msa"][:2])
    assert line[2][:8] == (21,) * 8
    rows = {tuple(row) for row in found["msa"][: int(found["num_alignments"])]} - {line[2]}
    assert rows == {tuple(row) for row in expected["msa"][: int(expected["num_alignments"])]}


@pytest.mark.parametrize(
    ("fields", "own", "paired"),
    [
        ({"use_msas": False}, 0, 0),
        ({"use_main_msas": False}, 0, 1),
        ({"use_paired_msas": False}, 1, 0),
        ({}, 1, 1),
    ],
)
def test_unused_alignments_are_left_out(files: Path, fields: dict[str, bool], own: int, paired: int) -> None:
    """Said of the query or of the chains."""
    names = {"main_msa_file_paths": "t/{}/bfd_uniref_hits.a3m", "paired_msa_file_paths": "{}_paired.a3m"}
    chains = [
        chain(sequence, name, **{key: place.format(name) for key, place in names.items()})
        for name, sequence in (("A", FIRST), ("B", SECOND))
    ]
    for target in (single(files, *chains, **fields), single(files, *(one | fields for one in chains))):
        assert target.alignments is not None
        assert [[len(group) for group in one or ()] for one in target.alignments] == [[own, paired]] * 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"molecule_type": "ligand", "smiles": "CC"}, "expected only proteins, found 'ligand' as entry 1"),
        ({"non_canonical_residues": {"1": "MSE"}}, "has 'non_canonical_residues'"),
        ({"cyclic": True}, "has 'cyclic'"),
        ({"main_msa_file_paths": "none.a3m"}, "entry 1, 'main_msa_file_paths': no such file: 'none.a3m'"),
        ({"main_msa_file_paths": ["a.npz"]}, "holds arrays; name the .a3m or .sto files"),
        ({"main_msa_file_paths": "x.txt"}, "expected .a3m or .sto"),
        ({"main_msa_file_paths": "hollow"}, "contains no alignment"),
        ({"main_msa_file_paths": "t/B"}, "the alignment belongs to another sequence"),
        ({"sequence": None}, "entry 1 lacks a text 'sequence'"),
    ],
)
def test_wrong_chains_are_refused_with_the_field(files: Path, fields: dict[str, Any], said: str) -> None:
    for name in ("a.npz", "x.txt"):
        (files / name).write_text("")
    (files / "hollow").mkdir()
    targets, (error,) = read(files, chain(FIRST) | fields)
    assert not targets
    assert str(error).startswith(f"{files / 'in.json'} (record 't'): ")
    assert said in str(error)


def test_other_contents_are_refused(tmp_path: Path) -> None:
    for tree, said in (
        ({"queries": {}}, "expected an object 'queries'"),
        ({"queries": {"t": {"chains": []}}}, "expected a list 'chains'"),
        ({"queries": {"t": {"chains": ["x"]}}}, "entry 1 of 'chains' must be an object"),
        ({"queries": {"t": {"chains": [chain("MK")], "covalent_bonds": [1]}}}, "has 'covalent_bonds'"),
        (
            {"queries": {"t": {"chains": [chain("MK")], "pocket_constraint": {"a": 1}}}},
            "has 'pocket_constraint'",
        ),
    ):
        (tmp_path / "in.json").write_text(json.dumps(tree))
        _, (error,) = read_targets([tmp_path / "in.json"])
        assert said in str(error)


def test_lines_of_other_numbers_are_refused(files: Path) -> None:
    (files / "B_paired.a3m").write_text(f">q\n{SECOND}\n")
    chains = [chain(s, n, paired_msa_file_paths=f"{n}_paired.a3m") for n, s in (("A", FIRST), ("B", SECOND))]
    _, (error,) = read(files, *chains)
    assert "expected equal numbers of paired rows in all chains, found 1 and 3" in str(error)


def test_hits_of_templates_are_named(tmp_path: Path) -> None:
    tree = {QUERIES: {"t": {"chains": [chain("MK", template_alignment_file_path="x.m8", foo=1)]}}}
    (record,) = parse_openfold3(QueryFile(tmp_path / "in.json", b""), tree)
    assert not isinstance(record, InputError)
    assert record.warnings == [
        "entry 1: 'foo' is not used",
        f"entry 1: its template hits are not used; {UNUSED_HITS}",
    ]
