"""Inputs of other programs: their proteins are read, and nothing else in them is left out in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastfold.data.queries.jobs import UNUSED_HITS
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
            {"protein": {"id": ["H", "B"], "sequence": "MKT", "unpairedMsa": ">q\nMKT\n"}},
            PROTEIN,
        ],
        "dialect": "alphafold3",
        "version": 1,
    }
    (target,), errors = read(tmp_path, tree)
    assert not errors
    assert (target.record, target.name) == ("my complex", "my_complex")
    assert [(chain.id, chain.record, chain.sequence) for chain in target.chains] == [
        ("H", "H", "MKT"),
        ("B", "B", "MKT"),
        ("A", "A", "MKT"),
    ]
    assert target.warnings == ()
    assert target.seeds == (1, 2)
    assert target.alignments is not None
    assert [[msa.sequences for msa in own] for own, _ in target.alignments] == [[("MKT",)]] * 3  # type: ignore[misc]


def test_names_of_chains_are_unique_and_part_of_file_names(tmp_path: Path) -> None:
    names = ["B", "a/b", "x" * 21]
    (target,), _ = read(tmp_path, {"sequences": [{"protein": {"id": names, "sequence": "MKT"}}]})
    assert [chain.id for chain in target.chains] == ["B", "A", "C"]
    assert target.warnings[0].startswith("chain 'a/b' is called A in the results, which need a short name")
    assert len(target.warnings) == 2
    targets, (error,) = read(tmp_path, {"sequences": [PROTEIN, PROTEIN]})
    assert targets == []
    assert "names two chains 'A'; rename one" in str(error)


def test_jobs_of_the_server(tmp_path: Path) -> None:
    job = {"name": "one", "sequences": [{"proteinChain": {"sequence": "MKV", "count": 3}}]}
    (one, two), errors = read(tmp_path, [job, job | {"name": "two"}])
    assert not errors
    assert [len(target.chains) for target in (one, two)] == [3, 3]
    assert [one.record, two.record] == ["one", "two"]


@pytest.mark.parametrize(("names", "records"), [("2", ["2"]), ("[1, 2]", ["1", "2"])])
def test_a_chain_that_is_named_by_a_number_is_one_chain(
    tmp_path: Path, names: str, records: list[str]
) -> None:
    text = f"sequences:\n  - protein: {{id: {names}, sequence: MKT}}\n"
    (target,), errors = read(tmp_path, text, "numbered.yaml")
    assert not errors
    assert [chain.record for chain in target.chains] == records


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
        ({"covalent_bonds": [{}]}, "has 'covalent_bonds'"),
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
        (
            {"sequences": [{"protein": {"sequence": "MK", "count": "2"}}]},
            "a whole number in 'count', found '2'",
        ),
        (
            {"sequences": [{"protein": {"sequence": "MK", "count": True}}]},
            "a whole number in 'count', found True",
        ),
        (
            {"sequences": [{"protein": {"id": False, "sequence": "MK"}}]},
            "name of a chain in 'id', found False",
        ),
        (
            {"sequences": [{"protein": {"id": ["A", {}], "sequence": "MK"}}]},
            "name of a chain in 'id', found {}",
        ),
        ({"sequences": [{"protein": {"id": [], "sequence": "MK"}}]}, "has 0 copies, expected 1 to"),
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


def test_an_alias_of_yaml_is_refused(tmp_path: Path) -> None:
    """A few of them stand for a file of any size."""
    text = "a: &x [1, 2]\nb: *x\nsequences: []\n"
    _, (error,) = read(tmp_path, text, "x.yaml")
    assert "is not plain YAML: an alias" in str(error)


@pytest.mark.parametrize(
    ("seeds", "expected", "warned"),
    [
        ([1, 2, 1], (1, 2), False),
        (["7", "4273000000"], (7, 4273000000 - 2**31), True),
        ([], (), False),
        (None, (), False),
    ],
)
def test_seeds_are_numbers_or_texts(
    tmp_path: Path, seeds: Any, expected: tuple[int, ...], *, warned: bool
) -> None:
    """The server writes texts, and seeds of 32 bits."""
    (target,), errors = read(tmp_path, {"name": "x", "modelSeeds": seeds, "sequences": [PROTEIN]})
    assert not errors
    assert target.seeds == expected
    assert bool(target.warnings) is warned


@pytest.mark.parametrize("seeds", [5, [-1], [1.5], [True], [2**32], ["x"], [[1]]])
def test_wrong_seeds_are_refused(tmp_path: Path, seeds: Any) -> None:
    _, (error,) = read(tmp_path, {"name": "x", "modelSeeds": seeds, "sequences": [PROTEIN]})
    assert "'modelSeeds': expected" in str(error)


def test_fields_that_are_not_used_are_named(tmp_path: Path) -> None:
    """Those of the format that mean nothing here come with a remedy; comments are comments."""
    protein = {"id": "A", "sequence": "MKT", "description": "x", "weird": 1, "empty": None}
    served = {"sequence": "MKT", "count": 1, "maxTemplateDate": "2021-01-01", "templatesPath": "hits.a3m"}
    tree = {"name": "x", "foo": 1, "sequences": [{"protein": protein}, {"proteinChain": served}]}
    (target,), _ = read(tmp_path, tree)
    assert target.warnings == (
        "the file: 'foo' is not used",
        "entry 1: 'weird' is not used",
        "entry 2: 'maxTemplateDate' is not used; give the date with `TemplateOptions.max_date`",
        f"entry 2: 'templatesPath' is not used; {UNUSED_HITS}",
    )


def test_a_folder_of_queries_may_hold_other_json_files(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text("{}")
    (tmp_path / "a.fasta").write_text(">a\nMKT\n")
    (target,), errors = read_targets([tmp_path])
    assert (target.record, errors) == ("a", [])
