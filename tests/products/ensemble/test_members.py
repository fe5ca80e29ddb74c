"""Ensembles that are read from folders of results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfold.errors import ConfigError, InputError
from fastfold.inference.output.load import read_prediction
from fastfold.products.ensemble.members import read_ensembles
from fastfold.protein import residue_constants as rc
from tests.helpers.results import helix_prediction


def test_members_are_the_predictions_by_rank(two_states: Path):
    (ensemble,) = read_ensembles(two_states)
    assert ensemble.target == "helices"
    assert [member.sample for member in ensemble.members] == [f"columns_{k:03d}" for k in range(1, 8)]
    assert ensemble.lengths == [30, 20]
    assert ensemble.numbers.tolist() == [*range(1, 31), *range(1, 21)]
    third = read_prediction(two_states, None, rank=3)["atom_positions"][:, rc.atom_order["CA"]]
    assert np.allclose(ensemble.ca[2], third)


def test_members_of_parts_have_the_numbers_of_the_whole_protein(tmp_path: Path):
    numbers = np.r_[10:20, 50:70]
    for rank in (1, 2, 3):
        helix_prediction("one", 30, seed=0, residue_index=numbers).save(tmp_path, rank=rank, plots=False)
    (ensemble,) = read_ensembles(tmp_path)
    assert all(one.protein.residue_index.tolist() == [*numbers + 1] for one in ensemble.members)


def test_samples_of_low_plddt_are_left_out(two_states: Path):
    (ensemble,) = read_ensembles(two_states, min_plddt=ensemble_plddt(two_states) - 0.1)
    assert len(ensemble.members) == 7
    with pytest.raises(InputError, match=r"at least 3 predictions of mean pLDDT 99 or more .* found 0"):
        read_ensembles(two_states, min_plddt=99.0)


def ensemble_plddt(folder: Path) -> float:
    return read_ensembles(folder)[0].members[0].mean_plddt


def test_a_folder_without_ensemble_is_refused(two_states: Path, tmp_path: Path):
    helix_prediction("one").save(tmp_path, rank=1, plots=False)
    with pytest.raises(InputError, match="at least 3 predictions of one target, found 1"):
        read_ensembles(tmp_path)
    with pytest.raises(ConfigError, match="has no target 'x'; it has 'helices'"):
        read_ensembles(two_states, target="x")
    with pytest.raises(InputError, match="cannot be read"):
        read_ensembles(tmp_path / "none")


def test_other_chains_under_one_name_are_refused(tmp_path: Path):
    for rank, seed in enumerate((0, 0, 1), 1):
        helix_prediction("one", 30, seed=seed).save(tmp_path, rank=rank, plots=False)
    with pytest.raises(InputError, match="expected the chains of one_rank_001"):
        read_ensembles(tmp_path)
