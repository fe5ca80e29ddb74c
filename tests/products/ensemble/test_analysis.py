"""Numbers of an ensemble, on structures whose answer is known."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold.products.ensemble.analysis import (
    analyze,
    cluster_structures,
    pairwise_scores,
    principal_components,
    representatives,
    superpose_on_mean,
    superposed_protein,
)
from fastfold.products.ensemble.members import read_ensembles
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.tm_score import rmsd, tm_score
from tests.helpers.written_numbers import superposed
from tests.products.ensemble.conftest import FAR

# Not imported by the process that runs other tests.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


def test_states_are_clusters_and_the_first_component(two_states: Path):
    (ensemble,) = read_ensembles(two_states)
    reference = ensemble.members[FAR[0]].prediction.files[".cif"]
    found = analyze(ensemble, references=[reference])
    assert found.clusters.tolist() == [2 if k in FAR else 1 for k in range(7)]
    assert found.representatives[1] in FAR
    assert found.variance[0] > 0.99
    first = found.components[:, 0]
    assert np.ptp(first[list(FAR)]) < 0.2
    assert abs(first[FAR[0]] - first[0]) > 5
    (state,) = found.states
    assert state.tm_score[FAR[0]] == pytest.approx(1.0)
    assert state.rmsd[FAR[0]] == pytest.approx(0.0, abs=2e-3)
    assert state.rmsd[0] == pytest.approx(found.rmsd[FAR[0], 0], abs=5e-3)
    assert state.tm_score[0] < 0.8
    assert analyze(ensemble, num_clusters=7).clusters.max() == 7
    assert analyze(ensemble, similarity=0.1).clusters.max() == 1


def test_pairs_are_those_of_the_metrics():
    rng = np.random.default_rng(1)
    ca = np.cumsum(rng.normal(0, 2.2, (1, 40, 3)), 1) + rng.normal(0, 1, (4, 40, 3))
    scores, distances = pairwise_scores(ca)
    points, mask = torch.from_numpy(ca), torch.ones(40)
    assert np.array_equal(scores, scores.T)
    assert np.array_equal(np.diag(scores), np.ones(4))
    assert np.array_equal(np.diag(distances), np.zeros(4))
    for i, j in ((0, 1), (2, 3)):
        exact = tm_score(points[i], points[j], mask)
        assert exact - 0.02 < scores[i, j] <= exact + 1e-6
        assert distances[i, j] == pytest.approx(float(rmsd(points[i], points[j], mask)))


def test_clusters_are_numbered_by_size():
    scores = np.full((6, 6), 0.3)
    for members in ([0], [1, 3], [2, 4, 5]):
        scores[np.ix_(members, members)] = 0.9
    scores[4, 2] = scores[2, 4] = scores[4, 5] = scores[5, 4] = 0.95
    np.fill_diagonal(scores, 1.0)
    clusters = cluster_structures(scores)
    assert clusters.tolist() == [3, 2, 1, 2, 1, 1]
    assert representatives(scores, clusters) == (4, 1, 0)
    assert cluster_structures(scores, similarity=0.2).tolist() == [1] * 6


@pytest.mark.parametrize("seed", range(4))
def test_the_frame_is_centered_with_the_longest_axis_first(seed: int):
    rng = np.random.default_rng(seed)
    shape = rng.normal(0, 1, (50, 3)) * [1.0, 9.0, 3.0]
    ca = np.stack([shape @ _rotation(rng).T + rng.normal(0, 30, 3) for _ in range(4)])
    found = superpose_on_mean(ca)
    assert np.abs(found - found[0]).max() < 1e-9
    assert np.abs(found.mean((0, 1))).max() < 1e-9
    assert (np.diff(found[0].std(0)) < 0).all()
    covariance = np.cov(found[0].T)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 1e-9
    assert float(rmsd(torch.from_numpy(found[1]), torch.from_numpy(ca[1]), torch.ones(50))) < 1e-5


def test_fluctuation_of_one_moving_residue(two_states: Path):
    (ensemble,) = read_ensembles(two_states)
    ca = np.repeat(ensemble.ca[:1], 2, 0)
    ca[0, 7] += [0.0, 2.0, 0.0]
    deviations = superpose_on_mean(ca)
    deviations = deviations - deviations.mean(0)
    fluctuation = np.sqrt(np.square(deviations).sum(-1).mean(0))
    assert fluctuation[7] == pytest.approx(1.0, abs=0.1)
    assert np.delete(fluctuation, 7).max() < 0.1


def test_components_of_equal_structures_are_zero():
    points, shares = principal_components(np.tile(np.arange(12.0).reshape(4, 3), (3, 1, 1)))
    assert points.shape == (3, 2)
    assert not points.any()
    assert not shares.any()


@pytest.mark.parametrize("seed", range(3))
def test_structures_stay_where_they_are_superposed_again(seed: int):
    """Structures that differ much need several rounds, after which each fits the mean best as it is."""
    rng = np.random.default_rng(seed)
    shape = rng.normal(0, 6, (30, 3))
    ca = [(shape + rng.normal(0, 4, shape.shape)) @ _rotation(rng) + rng.normal(0, 20, 3) for _ in range(5)]
    found = superpose_on_mean(np.array(ca))
    again = np.array([superposed(one, found.mean(0)) for one in found])
    assert np.abs(again - found).max() < 2e-6


def test_all_atoms_follow_the_superposition(two_states: Path):
    (ensemble,) = read_ensembles(two_states)
    found = analyze(ensemble)
    protein = superposed_protein(ensemble, found, 3)
    ca = protein.atom_positions[:, rc.atom_order["CA"]]
    assert np.abs(ca - found.superposed[3]).max() < 1e-3


def _rotation(rng: np.random.Generator) -> np.ndarray:
    matrix = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    return matrix * np.linalg.det(matrix)
