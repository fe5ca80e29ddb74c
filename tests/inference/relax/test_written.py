"""Relaxation of predictions that stand in a results folder; what the force field makes of them is given here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest

from fastfold.data.targets import Chain, Target
from fastfold.errors import InputError
from fastfold.inference.output.results_folder import ResultsFolder, TargetResults
from fastfold.inference.relax import files
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.result import RelaxResult
from fastfold.protein.io.read import read_structure
from fastfold.protein.protein import Hydrogens, Protein
from fastfold.protein.structure import structure_to_protein
from tests.helpers.results import helix_prediction

pytest.importorskip("openmm", reason="the mmCIF file names its version")
HYDROGENS = Hydrogens(np.array([0]), ("H",), np.ones((1, 3)))


def _by_seed(scores: Sequence[Any]) -> list[float]:
    return [-float(one["seed"]) for one in scores]


@pytest.fixture
def results(tmp_path: Path) -> TargetResults:
    """Two predictions of one target, by seeds 0 and 1."""
    one = helix_prediction("t", 6)
    target = Target("t", (Chain("A", one.sequences[0]),), "", "t", ())
    found = ResultsFolder(tmp_path).target(target)
    for seed in (0, 1):
        prediction = helix_prediction("t", 6, seed=0, model_name=f"model_{seed}")
        scores = {"model": prediction.model_name, "seed": seed, "plddt": 70.0}
        found.add(f"{seed}" * 64, f"seed_{seed}", prediction.files(plots=False), scores, _by_seed)
    return found


def _relaxed(protein: Protein, reason: str = "", after: float | None = -1234.5) -> RelaxResult:
    moved = Protein(**(vars(protein) | {"atom_positions": protein.atom_positions + 1.0}))
    return RelaxResult(
        protein=moved,
        hydrogens=None if after is None else HYDROGENS,
        reason=reason,
        platform="CPU",
        energy_before=999.0,
        energy_after=after,
        restraint_energy=1.0,
        heavy_atom_rmsd=0.123,
        violations_before=(),
        violations=(),
        rounds=1,
        iterations=2,
        iteration_limit_reached=False,
        residues_freed=0,
        atoms_added=0,
        seconds=3.4,
    )


def test_a_chain_without_atoms_is_a_reason(tmp_path: Path) -> None:
    """The .cif file of a chain of unknown residues has no atoms, and is read without the chain."""
    one = helix_prediction("t", 6, 2)
    aatype, mask = one.aatype.copy(), one.atom_mask.copy()
    aatype[6:], mask[6:] = 20, 0.0
    prediction = replace(one, aatype=aatype, atom_mask=mask, sequences=(one.sequences[0], "XX"))
    target = Target("t", (Chain("A", one.sequences[0]), Chain("B", "XX")), "", "t", ())
    results = ResultsFolder(tmp_path).target(target)
    scores = {"model": prediction.model_name, "seed": 0, "plddt": 70.0}
    results.add("0" * 64, "seed_0", prediction.files(plots=False), scores, _by_seed)
    (record,) = results.records()
    added, outcome = files.relax_written(results, record)
    assert list(added) == ["_scores.json"]
    assert outcome["relaxed"] is False
    assert "a chain has only unknown residues (X), and no atoms" in outcome["reason"]


def test_files_are_added_and_nothing_that_was_there_changes(
    results: TargetResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, seen = RelaxConfig(platform="CPU"), []
    monkeypatch.setattr(
        files, "relax", lambda protein, config, **options: seen.append(config) or _relaxed(protein)
    )
    before = {record.key: record for record in results.records()}
    outcomes = list(files.relax_results(results, results.records()[:1], _by_seed, settings))
    assert seen == [settings]
    ((record, words, relaxed),) = outcomes
    assert relaxed
    assert words == "relaxed from 999 to -1,234 kJ/mol, heavy atoms moved by 0.12 Å, 3 s on CPU"
    old = before["seed_0"]
    assert set(record.files) == set(old.files) | {"_relaxed.pdb", "_relaxed.cif"}
    assert {e for e in old.files if record.files[e] != old.files[e]} == {"_scores.json"}
    assert record.scores == {**old.scores, "relaxation": True, "relaxed_energy": -1234.5}
    assert results.records()[1] == before["seed_1"]
    scores = json.loads(results.path(record, "_scores.json").read_text())
    assert scores["relaxation"]["energy_after_kj_per_mol"] == -1234.5
    assert len(scores["plddt"]) == 6
    plain, moved = (
        structure_to_protein(read_structure(results.path(record, ending)))
        for ending in (".cif", "_relaxed.cif")
    )
    (table,) = json.loads(results.path(record, "_pae.json").read_text())
    relaxed_cif = gemmi.cif.read_string(results.path(record, "_relaxed.cif").read_text()).sole_block()
    pairs = relaxed_cif.find_values("_ma_qa_metric_local_pairwise.metric_value")
    assert [float(value) for value in pairs] == list(itertools.chain(*table["predicted_aligned_error"]))
    shift = (moved.atom_positions - plain.atom_positions)[plain.atom_mask > 0]
    np.testing.assert_allclose(shift, 1.0, atol=2e-3)
    # What is relaxed is not relaxed again, and what another process works on is left to it.
    with results.claimed("1" * 64):
        assert list(files.relax_results(results, results.records(), _by_seed)) == []


def test_a_structure_that_the_force_field_refuses_is_noted_as_such(
    results: TargetResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(protein: Protein, config: RelaxConfig | None, **options: Any) -> RelaxResult:
        raise InputError("stands alone")

    monkeypatch.setattr(files, "relax", refuse)
    written, found = files.relax_written(results, results.records()[0])
    assert found == {"relaxed": False, "reason": "stands alone"}
    assert list(written) == ["_scores.json"]
    ((record, words, relaxed), _) = files.relax_results(results, results.records(), _by_seed)
    assert (words, relaxed) == ("warning: not relaxed: stands alone", False)
    assert (record.scores["relaxation"], record.scores["relaxed_energy"]) == (False, None)


@pytest.mark.parametrize(("after", "endings"), [(5.0, {"_relaxed.pdb", "_relaxed.cif"}), (None, set())])
def test_what_does_not_count_as_relaxed_has_no_energy(
    results: TargetResults, monkeypatch: pytest.MonkeyPatch, after: float | None, endings: set[str]
) -> None:
    """Its structure is written where the minimiser came to one."""
    monkeypatch.setattr(
        files, "relax", lambda protein, config, **options: _relaxed(protein, "it clashes", after)
    )
    ((record, words, relaxed),) = files.relax_results(results, results.records()[:1], _by_seed)
    assert (words, relaxed, record.scores["relaxed_energy"]) == (
        "warning: not relaxed: it clashes",
        False,
        None,
    )
    assert {ending for ending in record.files if "relaxed" in ending} == endings


def test_a_relaxed_structure_has_the_numbers_of_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole proteins, and of parts, whose ends must not be bonded."""
    whole = helix_prediction("t", 6)
    target = Target("t", (Chain("A", whole.sequences[0]),), "", "t", ())
    results = ResultsFolder(tmp_path).target(target)
    given: list[list[int]] = []

    def relax(protein: Protein, *args: Any, **settings: Any) -> RelaxResult:
        given.append(protein.residue_index.tolist())
        return _relaxed(protein)

    monkeypatch.setattr(files, "relax", relax)
    for seed, numbers in enumerate(([1, 2, 3, 4, 5, 6], [4, 5, 6, 10, 11, 12])):
        prediction = replace(whole, residue_index=np.array(numbers) - 1)
        scores = {"model": "m", "seed": seed, "plddt": 70.0}
        record = results.add(f"{seed}" * 64, f"seed_{seed}", prediction.files(plots=False), scores, _by_seed)
        written, _ = files.relax_written(results, record)
        pdb = str(written["_relaxed.pdb"])
        lines = [int(line[22:26]) for line in pdb.splitlines() if line.startswith("ATOM")]
        assert given[-1] == sorted(set(lines)) == numbers
