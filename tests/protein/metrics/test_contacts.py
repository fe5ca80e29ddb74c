"""Scores of a distogram: their definitions on cases worked out by hand, and residues that nobody saw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ml_collections import ConfigDict

from benchmarks.no_skill import SeparationPrior
from fastfold.evoformer.losses.heads import distogram_loss
from fastfold.protein.metrics.contacts import (
    BANDS,
    ContactPrecision,
    contact_precision,
    contact_probabilities,
    distogram_cross_entropy,
    score_distogram,
)

EDGES = np.linspace(2.3125, 21.6875, 63)


def chain(residues: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A random walk of 3.8 Å steps in a box, and a mask: all are resolved."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(residues, 3))
    points = 3.8 * np.cumsum(steps / np.linalg.norm(steps, axis=-1, keepdims=True), 0)
    return np.abs((points + 9.0) % 36.0 - 18.0), np.ones(residues)


def distances(beta: np.ndarray) -> np.ndarray:
    return np.linalg.norm(beta[:, None] - beta, axis=-1)


def perfect(beta: np.ndarray) -> np.ndarray:
    """Logits of a network that is sure of the truth."""
    return 50.0 * np.eye(64, dtype=np.float32)[np.searchsorted(EDGES, distances(beta))]


def test_a_perfect_distogram_has_no_cross_entropy_and_full_precision():
    beta, mask = chain(120)
    score = score_distogram(perfect(beta), EDGES, beta, mask)
    assert list(score.cross_entropy) == list(BANDS)
    assert max(score.cross_entropy.values()) < 1e-6
    assert score.contacts is not None
    assert score.contacts.l5 == 1.0
    assert score.long_range is not None
    assert score.long_range.l5 == 1.0


def test_a_uniform_distogram_has_the_entropy_of_its_bins():
    beta, mask = chain(60)
    score = score_distogram(np.full((60, 60, 64), 3.0, np.float32), EDGES, beta, mask)
    assert list(score.cross_entropy.values()) == pytest.approx([np.log(64)] * 4)


def test_cross_entropy_of_each_band_is_the_mean_over_its_pairs():
    beta, mask = chain(30)
    logits = np.random.default_rng(1).normal(size=(30, 30, 64))
    logits += logits.transpose(1, 0, 2)
    mask[7] = 0.0
    expected: dict[str, list[float]] = {name: [] for name in BANDS}
    for i in range(30):
        for j in range(i + 1, 30):
            for name, (low, high) in BANDS.items():
                if low <= j - i < high and mask[i] and mask[j]:
                    p = np.exp(logits[i, j]) / np.exp(logits[i, j]).sum()
                    place = sum(np.linalg.norm(beta[i] - beta[j]) > edge for edge in EDGES)
                    expected[name].append(-np.log(p[place]))
    found = distogram_cross_entropy(logits, EDGES, beta, mask)
    assert found == pytest.approx({name: np.mean(values) for name, values in expected.items()})


def test_bands_without_pairs_are_left_out():
    beta, mask = chain(10)
    assert list(distogram_cross_entropy(perfect(beta), EDGES, beta, mask)) == ["3_6", "6_12"]
    assert distogram_cross_entropy(perfect(beta), EDGES, beta, 0.0 * mask) == {}


def test_bins_are_those_of_the_distogram_loss():
    """On an edge too, which belongs to the bin under it."""
    beta, mask = np.zeros((4, 3)), np.array([1.0, 0.0, 0.0, 1.0])
    for x in (1.0, 2.3125, 2.4, 21.6875, 30.0):
        beta[3, 0] = x
        logits = np.random.default_rng(2).normal(size=(4, 4, 64))
        logits += logits.transpose(1, 0, 2)
        logits[0, 0] = logits[3, 3] = (
            50.0 * np.eye(64)[0]
        )  # residues with themselves, which the loss counts too
        head = {"logits": torch.from_numpy(logits), "bin_edges": torch.from_numpy(EDGES)}
        batch = {"pseudo_beta": torch.from_numpy(beta), "pseudo_beta_mask": torch.from_numpy(mask)}
        loss = distogram_loss({"distogram": head}, batch, ConfigDict())["loss"].item()
        assert distogram_cross_entropy(logits, EDGES, beta, mask)["3_6"] == pytest.approx(2 * loss, rel=1e-5)


def test_probability_of_a_contact_takes_a_part_of_the_bin_at_its_border():
    logits = np.log(np.full((1, 1, 4), [0.1, 0.2, 0.3, 0.4]))
    edges = np.array([4.0, 7.0, 11.0])  # 8 Å is a quarter into the third bin
    assert contact_probabilities(logits + 5.0, edges)[0, 0] == pytest.approx(0.1 + 0.2 + 0.3 / 4)


def ladder() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Twenty residues, five of whose pairs touch each other across 12 and more: positions, mask, scores."""
    beta = np.zeros((20, 3))
    beta[:, 0] = 100.0 * np.arange(20)
    for i in range(5):  # i and 19 - i, 19 to 11 residues apart: the last is too near
        beta[19 - i] = beta[i] + [0.0, 5.0, 0.0]
    beta[14] = beta[1] + [0.0, 7.9, 0.0]  # 13 apart, and 4 from 18: the fifth
    scores = np.zeros((20, 20))
    return beta, np.ones(20), scores


def test_precision_counts_contacts_among_the_best_pairs():
    beta, mask, scores = ladder()
    scores[0, 19], scores[0, 15], scores[1, 18], scores[2, 17] = 4.0, 3.0, 2.0, 1.0
    scores[3, 4] = 9.0  # too near in the sequence to count
    found = contact_precision(scores, beta, mask)
    # 36 pairs are 12 and more apart; best 4: contact, none, contact, contact. Best 10: six more without any score,
    # in the order of their residues: (0, 12) to (0, 18) less (0, 15), of which none is a contact.
    assert found == ContactPrecision(l5=0.75, l2=0.3, base_rate=5 / 36)


def test_few_contacts_have_no_precision():
    beta, mask, scores = ladder()
    assert contact_precision(scores, beta, mask, 13) is not None
    beta[14, 1] += 0.2  # 8.1 Å
    assert contact_precision(scores, beta, mask) is None
    assert contact_precision(scores[:4, :4], beta[:4], mask[:4]) is None


def test_residues_that_are_not_resolved_do_not_count():
    """Whatever stands there, and whatever is promised of them."""
    beta, mask = chain(80)
    logits = np.random.default_rng(3).normal(size=(80, 80, 64))
    logits += logits.transpose(1, 0, 2)
    hidden = np.array([5, 40, 41, 79])
    mask[hidden] = 0.0
    before = score_distogram(logits, EDGES, beta, mask)
    beta[hidden], logits[hidden], logits[:, hidden] = np.nan, 30.0 * np.eye(64)[0], 30.0 * np.eye(64)[0]
    assert score_distogram(logits, EDGES, beta, mask) == before
    mask[hidden], beta[hidden] = 1.0, 0.0
    assert score_distogram(logits, EDGES, beta, mask) != before


def test_missing_residues_at_the_end_are_as_good_as_absent():
    """L is the number of resolved residues."""
    beta, mask = chain(80)
    mask[60:] = 0.0
    scores = np.random.default_rng(4).normal(size=(80, 80))
    assert contact_precision(scores, beta, mask) == contact_precision(scores[:60, :60], beta[:60], mask[:60])


def test_separation_prior_counts_distances_by_separation():
    beta = np.zeros((3, 3))
    beta[:, 0] = [0.0, 3.0, 10.0]
    prior = SeparationPrior.from_structures([(beta, np.array([1.0, 1.0, 1.0]))], np.array([4.0, 8.0]))
    found = np.exp(prior.log_probabilities)
    assert found.shape == (256, 3)
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-6)
    # One count in each bin, and: itself three times; 3 and 7 Å at separation 1; 10 Å at separation 2; no other.
    np.testing.assert_allclose(found[0], [4 / 6, 1 / 6, 1 / 6], rtol=1e-6)
    np.testing.assert_allclose(found[1], [2 / 5, 2 / 5, 1 / 5], rtol=1e-6)
    np.testing.assert_allclose(found[2], [1 / 4, 1 / 4, 2 / 4], rtol=1e-6)
    np.testing.assert_allclose(found[3:], 1 / 3, rtol=1e-6)


def test_separation_prior_of_a_chain_is_a_distogram():
    """Separations of 255 and more have one row, and residues that are not resolved are not counted."""
    beta, mask = chain(300)
    mask[10] = 0.0
    beta[10] = np.nan
    prior = SeparationPrior.from_structures([(beta, mask), chain(50, seed=1)], EDGES)
    logits = prior.logits(300)
    assert logits.shape == (300, 300, 64)
    np.testing.assert_allclose(np.exp(logits).sum(-1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(logits, logits.transpose(1, 0, 2))
    np.testing.assert_array_equal(logits[0, 255], logits[0, 299])
    np.testing.assert_array_equal(logits[3, 8], logits[20, 25])
    found = distogram_cross_entropy(logits, EDGES, beta, mask)
    assert all(x < np.log(64) for x in found.values())
