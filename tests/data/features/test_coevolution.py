"""Coevolution from alignments: against the definition on small ones, and its precision on real ones."""

from __future__ import annotations

import csv
import itertools

import numpy as np
import pytest
import torch

from fastfold.data.features import coevolution
from fastfold.data.features.raw import msa_features
from fastfold.data.features.transforms import to_restype_order
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import read_entry
from fastfold.data.training.labels import structure_labels
from fastfold.protein import residue_constants as rc
from tests.conftest import require_shared


def _one_hot(rows: np.ndarray) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.from_numpy(rows).long(), 21).float()[..., :20]


def _alignment(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Random rows in whose columns 1 and length - 2 the residues are the same function of each other."""
    rng = np.random.default_rng(seed)
    msa = rng.integers(0, 20, (rows, length))
    msa[:, length - 2] = (msa[:, 1] + 7) % 20
    return msa


@pytest.mark.parametrize("zero_sum", [True, False])
@pytest.mark.parametrize("rows", [30, 79, 80, 200], ids=lambda rows: f"{rows} rows of 4 columns")
def test_scores_are_those_of_the_definition(rows: int, zero_sum: bool) -> None:
    """Frequencies, covariance, its inverse, gauge, norm and average product, written as loops in float64."""
    rng = np.random.default_rng(1)
    msa, weights, share = rng.integers(0, 21, (rows, 4)), rng.random(rows) + 0.5, 0.3
    length, total = msa.shape[1], weights.sum()
    single = np.full((length, 21), share / 21)
    joint = np.full((length, length, 21, 21), share / 21**2)
    for row, weight in zip(msa, weights, strict=True):
        for i in range(length):
            single[i, row[i]] += (1 - share) * weight / total
            for j in range(length):
                joint[i, j, row[i], row[j]] += (1 - share) * weight / total
    for i in range(length):
        joint[i, i] = np.diag(single[i])
    covariance = joint - single[:, None, :, None] * single[None, :, None, :]
    square = covariance[:, :, :20, :20].transpose(0, 2, 1, 3).reshape(length * 20, length * 20)
    couplings = -np.linalg.inv(square).reshape(length, 20, length, 20).transpose(0, 2, 1, 3)
    norm = np.zeros((length, length))
    for i, j in itertools.permutations(range(length), 2):
        full = np.zeros((21, 21))
        full[:20, :20] = couplings[i, j]
        if zero_sum:
            full += full.mean() - full.mean(axis=0, keepdims=True) - full.mean(axis=1, keepdims=True)
            np.testing.assert_allclose(full.sum(axis=0), 0, atol=1e-8)
        norm[i, j] = np.sqrt((full[:20, :20] ** 2).sum())
    mean = norm.sum(axis=0) / (length - 1)
    expected = norm - mean[:, None] * mean[None, :] / (norm.sum() / (length * (length - 1)))
    np.fill_diagonal(expected, 0)
    found = coevolution.coupling_scores(
        _one_hot(msa), torch.from_numpy(weights).float(), pseudocount=share, zero_sum=zero_sum
    )
    np.testing.assert_allclose(found, expected, atol=5e-6 * norm.max())
    np.testing.assert_array_equal(found, found.T)


@pytest.mark.parametrize(("rows", "length"), [(3, 70), (600, 30), (30, 70), (1100, 40)])
def test_long_and_deep_alignments_are_those_of_numpy(rows: int, length: int) -> None:
    """In blocks of columns and of rows, as by PyTorch's inverse in float64."""
    rng = np.random.default_rng(2)
    msa = np.where(
        rng.random((rows, length)) < rng.uniform(0.05, 0.6, (rows, 1)), rng.integers(0, 21, (rows, length)), 7
    )
    found = coevolution.analyze(msa)
    similar = ((msa[:, None] == msa[None]).mean(axis=-1) > 0.8).sum(axis=1)
    assert found.log_effective_rows == pytest.approx(np.log((1 / similar).sum()), abs=1e-6)
    one_hot, weights = np.eye(21)[msa][..., :20].reshape(rows, -1), 1 / similar / (1 / similar).sum()
    single = 0.5 * weights @ one_hot + 0.5 / 21
    joint = 0.5 * (one_hot * weights[:, None]).T @ one_hot + 0.5 / 21**2
    for start in range(0, length * 20, 20):
        joint[start : start + 20, start : start + 20] = np.diag(single[start : start + 20])
    couplings = np.linalg.inv(joint - np.outer(single, single)).reshape(length, 20, length, 20)
    couplings = couplings - couplings.sum(axis=3, keepdims=True) / 21
    couplings = couplings - couplings.sum(axis=1, keepdims=True) / 21
    norm = np.sqrt((couplings**2).sum(axis=(1, 3)))
    np.fill_diagonal(norm, 0)
    mean = norm.sum(axis=0) / (length - 1)
    expected = norm - np.outer(mean, mean) / (norm.sum() / (length * (length - 1)))
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(found.scores, expected, atol=2e-5 * norm.max())


def test_an_alignment_is_analysed_once_for_seeds_networks_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    plain = coevolution.analyze
    monkeypatch.setattr(coevolution, "analyze", lambda msa: numbers.append(len(msa)) or plain(msa))
    first, second = (_alignment(number, 9, seed=5) for number in (21, 22))
    chains = coevolution.of_chains([first, second, first])
    again = coevolution.of_alignment(first)
    assert numbers == [21, 22]
    pair = chains["coevolution_pair"]
    for start in (0, 18):
        np.testing.assert_array_equal(pair[start : start + 9, start : start + 9], again["coevolution_pair"])
    again["coevolution_single"][:] = 0
    assert coevolution.of_alignment(first)["coevolution_single"].any()


def test_a_coupled_pair_scores_highest() -> None:
    found = coevolution.analyze(_alignment(400, 12))
    assert found.scores is not None
    pairs = np.triu(found.scores, 1)
    assert np.unravel_index(pairs.argmax(), pairs.shape) == (1, 10)
    np.testing.assert_allclose(found.scores, found.scores.T, atol=1e-5)


def test_profile_weights_similar_rows_once() -> None:
    """Nine copies of one row count as much as one other row."""
    msa = np.zeros((10, 10), np.int64)
    msa[1:] = 5
    found = coevolution.analyze(msa)
    assert found.log_effective_rows == pytest.approx(np.log(2), abs=1e-6)
    # The query counts half a row more.
    np.testing.assert_allclose(found.profile[:, 0], 1.5 / 2.5, rtol=1e-6)
    np.testing.assert_allclose(found.profile[:, 5], 1.0 / 2.5, rtol=1e-6)
    np.testing.assert_allclose(found.profile.sum(axis=1), 1, rtol=1e-6)


def test_conservation_is_that_of_the_residues() -> None:
    conserved = coevolution.analyze(np.zeros((3, 4), np.int64))
    np.testing.assert_allclose(conserved.conservation, np.log(20), rtol=1e-5)
    even = coevolution.analyze(np.tile(np.arange(20)[:, None], (1, 30)))
    assert even.conservation.max() < 0.1


def test_rows_of_gaps_are_left_out() -> None:
    msa = _alignment(50, 10)
    gaps = np.full((50, 10), 21)
    gaps[:, 0] = 3
    with_gaps = coevolution.analyze(np.concatenate([msa, gaps]))
    np.testing.assert_array_equal(with_gaps.profile, coevolution.analyze(msa).profile)


def test_features_without_alignment_are_zeros() -> None:
    query = np.zeros((1, 7), np.int64)
    for found in (coevolution.of_alignment(query), coevolution.features(None, 7)):
        assert found["coevolution_single"].shape == (7, coevolution.SINGLE_CHANNELS)
        assert found["coevolution_pair"].shape == (7, 7, coevolution.PAIR_CHANNELS)
        assert not any(x.any() for x in found.values())


def test_features_rank_pairs_from_the_highest() -> None:
    found = coevolution.features(coevolution.analyze(_alignment(400, 12)), 12)["coevolution_pair"]
    assert np.isfinite(found).all()
    best = found[1, 10, 1]
    assert best == found[..., 1].max() == pytest.approx(np.clip(np.log(12), -4, 4) / 2)
    assert (found[..., 2] == 1).all()


def test_long_chains_get_no_couplings_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    msa = np.zeros((3, coevolution.MAX_RESIDUES + 1), np.int64)
    msa[1] = 1
    assert coevolution.analyze(msa).scores is None
    assert "no couplings" in caplog.text


def test_subsets_are_fixed_and_differ() -> None:
    msa = rc.hhblits_id_to_restype.argsort()[_alignment(100, 10)]
    whole, first, again, second = (coevolution.analyze_subset(msa, n) for n in (0, 1, 1, 2))
    np.testing.assert_array_equal(first.profile, again.profile)
    assert first.log_effective_rows < whole.log_effective_rows
    assert np.abs(first.profile - second.profile).max() > 0


@pytest.mark.slow
def test_precision_on_real_alignments_needs_the_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-L/5 precision at separation 12 and more: 0.63 on eight deep alignments, 0.08 without the zero-sum gauge."""
    folder = require_shared("data", "structures")
    with (folder / "index.tsv").open() as file:
        rows = {r["name"]: int(r["msa_rows"] or 0) for r in csv.DictReader(file, delimiter="\t")}
    entries = open_dataset(folder, split="valid").entries
    chosen = [entry for entry in entries if len(entry) <= 106 and 540 <= rows[entry.id] <= 760]
    assert len(chosen) == 8
    found: dict[bool, list[float]] = {True: [], False: []}
    original = coevolution.coupling_scores
    for entry in chosen:
        data = read_entry(entry)
        chain = data.chain
        labels = structure_labels(
            rc.sequence_to_aatype(chain.sequence), chain.positions, chain.mask, resolution=2.0
        )
        beta, mask = labels["pseudo_beta"], labels["pseudo_beta_mask"] > 0
        contact = np.linalg.norm(beta[:, None] - beta[None], axis=-1) < 8
        position = np.arange(len(chain))
        far = (position[:, None] - position >= 12) & mask[:, None] & mask[None]
        msa = to_restype_order(msa_features(data.alignments, chain.sequence)["msa"])
        for gauge in found:
            monkeypatch.setattr(
                coevolution, "coupling_scores", lambda x, w, gauge=gauge: original(x, w, zero_sum=gauge)
            )
            scores = coevolution.analyze(msa).scores
            assert scores is not None
            best = np.argsort(-scores[far])[: len(chain) // 5]
            found[gauge].append(float(contact[far][best].mean()))
    assert np.mean(found[True]) > 0.62
    assert np.mean(found[False]) < 0.15
