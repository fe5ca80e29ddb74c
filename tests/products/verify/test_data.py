"""Alignments become what the official data pipeline recorded of them, array by array."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastfold.errors import InputError
from fastfold.products.verify import verify
from fastfold.products.verify.data import EXPECTED, RecordedArray, compute_recorded
from tests.conftest import REPOSITORY, require_shared

CARRIED = REPOSITORY / "tests" / "oracles" / "synthetic_msas"
MONOMERS = ("edges", "2q2k_A", "2q2k_B", "chemokine", "thioredoxin")
COMPLEXES = ("homodimer_2q2k", "hetero_2q2k_chemokine", "hetero_abc", "hetero_aba", "hetero_templates")
MADE = (("msas_folder", "limits", "gen_limits.py", 10), ("multimer_msas", "deep", "gen_deep_pair.py", 23))
"""Records whose inputs a script makes: deeper than all limits, and with ties in the order of pairs."""


def names_compared(directory: Path) -> set[str]:
    """Compares a record, all of which must agree."""
    found = list(verify(directory))
    assert [one.name for one in found if not one.passed] == []
    return {one.name for one in found}


def recorded(directory: Path) -> set[str]:
    """Names of the arrays of a record, but those of templates and the copy of the header."""
    with np.load(directory / EXPECTED) as file:
        return {name for name in file.files if "template" not in name and name != "domain_name"}


def test_a_carried_record_agrees() -> None:
    """Identifiers, blocks, annotation, wrapped lines, empty names, a row of gaps, repetitions over three searches."""
    assert names_compared(CARRIED) == recorded(CARRIED)


def test_arrays_are_given_beside_the_recorded_ones() -> None:
    """In the order of the record; what was recorded otherwise is not ours."""
    with np.load(CARRIED / EXPECTED) as file:
        expected = {name: file[name] for name in ("msa", "deletion_matrix_int", "num_alignments")}
    expected["msa"] = expected["msa"] + 1
    found = list(compute_recorded(CARRIED, expected))
    assert [type(one) for one in found] == [RecordedArray] * 3
    assert [one.name for one in found] == list(expected)
    assert all(one.theirs is expected[one.name] for one in found)
    assert [np.array_equal(one.ours, one.theirs) for one in found] == [False, True, True]


@pytest.mark.parametrize("name", MONOMERS)
def test_recorded_chains_agree(name: str) -> None:
    directory = require_shared("oracles_data", "msas_folder", name)
    assert names_compared(directory) == recorded(directory)


@pytest.mark.parametrize("name", COMPLEXES)
def test_recorded_complexes_agree(name: str) -> None:
    """Pairing, blocks, crops, padding; templates, or the empty one."""
    directory = require_shared("oracles_data", "multimer_msas", name)
    compared = names_compared(directory)
    assert compared >= recorded(directory)
    assert "template_aatype" in compared


@pytest.mark.long
@pytest.mark.parametrize(("group", "name", "script", "number"), MADE)
def test_records_of_deep_alignments_agree(
    tmp_path: Path, group: str, name: str, script: str, number: int
) -> None:
    """10,000 rows of UniRef90, 501 of MGnify, 1,024 pairs; a species of more than 600 rows; a stable order of ties."""
    directory = require_shared("oracles_data", group, name)
    subprocess.run([sys.executable, directory / script, tmp_path], check=True, capture_output=True)
    for line in (directory / "sha256.txt").read_text().splitlines():
        *place, digest = line.split()
        if (tmp_path.joinpath(*place)).exists():
            assert hashlib.sha256(tmp_path.joinpath(*place).read_bytes()).hexdigest() == digest
    for file in (EXPECTED, "query.fasta"):
        shutil.copy(directory / file, tmp_path)
    assert len(names_compared(tmp_path)) == number


@pytest.mark.parametrize(
    ("file", "old", "new", "wrong"),
    [
        ("uniref90_hits.sto", "-MKTAYIAFQ", "-MKTAYIAFW", {"msa"}),
        ("uniref90_hits.sto", "_LOXLA/1-24 ", "_LOXLB/1-24 ", {"msa_species_identifiers"}),
        ("bfd_uniclust_hits.a3m", "MKTAYacdefIBJO", "MKTAYacdeIBJO", {"deletion_matrix_int"}),
        ("uniprot_hits.sto", "-MKTAAIAK", "-MKTAVIAK", {"uniprot/msa"}),
    ],
)
def test_a_changed_alignment_shows(tmp_path: Path, file: str, old: str, new: str, wrong: set[str]) -> None:
    """The comparison can fail."""
    shutil.copytree(CARRIED, tmp_path / "case")
    path = tmp_path / "case" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert {one.name for one in verify(tmp_path / "case") if not one.passed} >= wrong


def test_the_order_of_searches_shows(tmp_path: Path) -> None:
    """BFD after MGnify is another result."""
    shutil.copytree(CARRIED, tmp_path / "case")
    (tmp_path / "case" / "bfd_uniclust_hits.a3m").rename(tmp_path / "case" / "x_hits.a3m")
    assert {one.name for one in verify(tmp_path / "case") if not one.passed} >= {"msa", "rows_parsed"}


def test_a_record_without_alignments_is_refused(tmp_path: Path) -> None:
    """Some are made by a script."""
    for file in (EXPECTED, "query.fasta"):
        shutil.copy(CARRIED / file, tmp_path)
    with pytest.raises(InputError, match="contains no alignments of the query"):
        list(verify(tmp_path))
