"""Inputs of AlphaFold 3 and Boltz: their proteins are read, and nothing else in them is left out in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.errors import InputError

PROTEIN = {"protein": {"id": "A", "sequence": "MKT"}}


def read(folder: Path, tree: Any, name: str = "in.json") -> tuple[list[Target], list[InputError]]:
    path = folder / name
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return read_targets([path])


def test_copies_and_names_of_alphafold_3(tmp_path: Path) -> None:
    tree = {
        "name": "my complex",
        "modelSeeds": [1, 2],
        "sequences": [
            {"protein": {"id": ["A", "B"], "sequence": "MKT", "unpairedMsa": ">q\nMKT\n"}},
            PROTEIN,
        ],
        "dialect": "alphafold3",
        "version": 1,
    }
    (target,), errors = read(tmp_path, tree)
    assert not errors
    assert (target.record, target.name) == ("my complex", "my_complex")
    assert [(chain.record, chain.sequence) for chain in target.chains] == [
        ("A", "MKT"),
        ("B", "MKT"),
        ("A", "MKT"),
    ]
    assert target.warnings == (
        "the seeds of the file are ignored; give them with --seeds",
        "alignments named in the file are ignored; give them with --msa-dir",
    )


def test_jobs_of_the_server(tmp_path: Path) -> None:
    job = {"name": "one", "sequences": [{"proteinChain": {"sequence": "MKV", "count": 3}}]}
    (one, two), errors = read(tmp_path, [job, job | {"name": "two"}])
    assert not errors
    assert [len(target.chains) for target in (one, two)] == [3, 3]
    assert [one.record, two.record] == ["one", "two"]


def test_yaml_of_boltz(tmp_path: Path) -> None:
    text = "version: 1\nsequences:\n  - protein:\n      id: [A, B]\n      sequence: mkt\n      msa: empty\n"
    (target,), errors = read(tmp_path, text, "dimer.yaml")
    assert not errors
    assert target.record == "dimer"
    assert [chain.sequence for chain in target.chains] == ["MKT", "MKT"]
    assert target.warnings == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sequences": [PROTEIN, {"ligand": {"id": "L", "ccdCodes": ["ATP"]}}]}, "found 'ligand' as entry 2"),
        ({"sequences": [{"dna": {"id": "D", "sequence": "ACGT"}}]}, "found 'dna' as entry 1"),
        ({"constraints": [{"bond": {}}]}, "has 'constraints'"),
        ({"bondedAtomPairs": [[1, 2]]}, "has 'bondedAtomPairs'"),
        (
            {
                "sequences": [
                    {"protein": {"id": "A", "sequence": "MK", "modifications": [{"ptmType": "SEP"}]}}
                ]
            },
            "has 'modifications'",
        ),
        ({"sequences": [{"protein": {"id": "A", "sequence": "MK7"}}]}, "'7'"),
        ({"sequences": [{"protein": {"id": "A", "sequence": "MK:MV"}}]}, "list each chain"),
        ({"sequences": [{"protein": {"sequence": "MK", "count": 10**9}}]}, "copies, expected 1 to"),
        ({"sequences": [{"protein": "MK"}]}, "lacks a text 'sequence'"),
        ({"sequences": ["MK"]}, "must have a single kind"),
        ({"sequences": []}, "expected an input of AlphaFold 3 or Boltz"),
    ],
)
def test_what_is_not_folded_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    targets, (error,) = read(tmp_path, {"name": "x", "sequences": [PROTEIN]} | change)
    assert not targets
    assert said in str(error)


@pytest.mark.parametrize(("name", "text"), [("x.json", "{"), ("x.yaml", "a: [1"), ("x.json", "[" * 100_000)])
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str) -> None:
    targets, (error,) = read(tmp_path, text, name)
    assert not targets
    assert str(error).startswith(str(tmp_path / name))


def test_a_folder_of_queries_may_hold_other_json_files(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text("{}")
    (tmp_path / "a.fasta").write_text(">a\nMKT\n")
    (target,), errors = read_targets([tmp_path])
    assert (target.record, errors) == ("a", [])
