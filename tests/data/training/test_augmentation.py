"""Block deletion removes whole blocks and never the query; the coin of the clamped FAPE; training's masking."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.data.features import monomer
from fastfold.data.features.pipeline import sampler_from_raw
from fastfold.data.training.augmentation import (
    delete_blocks,
    rows_left,
    sample_fape_clamp,
    subsample_rows,
)
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.losses.fape import backbone_fape
from fastfold.protein import residue_constants as rc
from tests.data.features.test_monomer import random_raw
from tests.helpers.feature_oracles import load, load_config
from tests.helpers.networks import oracle_config


@given(rows=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), blocks=st.integers(0, 6), vary=st.booleans())
@settings(deadline=None, max_examples=200)
def test_what_is_deleted_are_at_most_so_many_blocks(rows: int, seed: int, blocks: int, vary: bool) -> None:
    blocks = max(blocks, int(vary))
    kept = rows_left(
        rows, np.random.default_rng(seed), fraction=0.3, num_blocks=blocks, randomize_num_blocks=vary
    )
    assert kept[0] == 0
    assert (np.diff(kept) > 0).all()
    assert kept[-1] < rows
    gone = np.setdiff1d(np.arange(rows), kept)
    assert len(gone) <= blocks * int(rows * 0.3)
    if len(gone):
        runs = np.split(gone, np.flatnonzero(np.diff(gone) > 1) + 1)
        assert len(runs) <= blocks
        # A run is cut short only at either end of the alignment.
        for run in runs:
            assert len(run) >= int(rows * 0.3) or run[0] == 1 or run[-1] == rows - 1


def test_the_paper_deletes_about_three_quarters() -> None:
    rng = np.random.default_rng(0)
    share = np.mean([len(rows_left(1000, rng)) for _ in range(500)]) / 1000
    # A row at depth x survives five blocks that start evenly with probability (1 - min(x, 0.3))^5.
    depth = (np.arange(1000) + 0.5) / 1000
    assert share == pytest.approx(((1 - np.minimum(depth, 0.3)) ** 5).mean(), abs=0.01)


def test_a_random_number_of_blocks_goes_from_one_to_all() -> None:
    rng = np.random.default_rng(0)
    gone = [1000 - len(rows_left(1000, rng, fraction=0.01, randomize_num_blocks=True)) for _ in range(200)]
    assert {10, 20, 30, 40, 50} <= set(gone)
    assert min(gone) > 0


def test_rows_are_drawn_evenly_without_replacement() -> None:
    """The query stays first, the others keep their order, and each comes as often as any other."""
    raw = load("synthetic_monomer", "raw_features.npz")
    rows = len(raw["msa"])
    raw = raw | {"deletion_matrix_int": np.repeat(np.arange(rows)[:, None], raw["msa"].shape[1], axis=1)}
    rng, seen = np.random.default_rng(0), np.zeros(rows, int)
    for _ in range(400):
        found = subsample_rows(raw, 5, rng)
        kept = found["deletion_matrix_int"][:, 0]
        assert kept[0] == 0
        assert len(kept) == found["num_alignments"][0] == 5
        assert (np.diff(kept) > 0).all()
        np.testing.assert_array_equal(found["msa"], raw["msa"][kept])
        seen[kept] += 1
    expected = 400 * 4 / (rows - 1)
    assert (abs(seen[1:] - expected) < 5 * np.sqrt(expected)).all()
    for most in (rows, rows + 1):
        assert subsample_rows(raw, most, rng)["msa"] is raw["msa"]
    np.testing.assert_array_equal(subsample_rows(raw, 1, rng)["msa"], raw["msa"][:1])


def test_all_features_by_row_follow() -> None:
    raw = load("synthetic_monomer", "raw_features.npz")
    rows, length = raw["msa"].shape
    raw["msa_species_identifiers"] = np.array([f"S{row}" for row in range(rows)], np.bytes_)
    raw["deletion_matrix_int"] = np.tile(np.arange(rows)[:, None], (1, length))
    result = delete_blocks(raw, np.random.default_rng(3), num_blocks=2)
    kept = result["deletion_matrix_int"][:, 0]
    assert 0 < len(kept) < rows
    np.testing.assert_array_equal(result["msa"], raw["msa"][kept])
    assert result["msa_species_identifiers"].tolist() == [f"S{row}".encode() for row in kept]
    assert (result["num_alignments"] == len(kept)).all()
    assert result["num_alignments"].shape == (length,)
    for name in set(raw) - {"msa", "deletion_matrix_int", "msa_species_identifiers", "num_alignments"}:
        np.testing.assert_array_equal(result[name], raw[name])
    sampler_from_raw(result, load_config("synthetic_monomer")).sample(0)


def test_a_single_sequence_stays_as_it_is() -> None:
    raw = random_raw(1, 12)
    np.testing.assert_array_equal(delete_blocks(raw, np.random.default_rng(0))["msa"], raw["msa"])


def test_settings_and_features_that_make_no_sense_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"must be 0 to 1, found 1\.5"):
        rows_left(10, rng, fraction=1.5)
    with pytest.raises(ConfigError, match="at least 0 deleted blocks, found -1"):
        rows_left(10, rng, num_blocks=-1)
    with pytest.raises(ConfigError, match="at least 1 deleted blocks, found 0"):
        rows_left(10, rng, num_blocks=0, randomize_num_blocks=True)
    with pytest.raises(InputError, match="feature 'msa' is missing"):
        delete_blocks({}, rng)
    with pytest.raises(ConfigError, match="0 to 1"):
        sample_fape_clamp(rng, unclamped=-0.1)


def test_the_coin_leaves_a_tenth_unclamped() -> None:
    rng = np.random.default_rng(0)
    coins = np.array([sample_fape_clamp(rng) for _ in range(5000)])
    assert set(coins) == {0.0, 1.0}
    assert coins.mean() == pytest.approx(0.9, abs=0.015)
    assert sample_fape_clamp(rng, unclamped=0.0) == 1.0
    assert sample_fape_clamp(rng, unclamped=1.0) == 0.0


def test_the_loss_reads_the_coin() -> None:
    official = load("synthetic_monomer")
    batch = {key: torch.from_numpy(value[-1:]) for key, value in official.items()}
    config = oracle_config().model.heads.structure_module
    far = batch["backbone_affine_tensor"][None].clone()
    far[..., 4:] *= 7.0
    rng = np.random.default_rng(0)
    loss = {}
    for unclamped in (0.0, 1.0):
        coin = torch.from_numpy(sample_fape_clamp(rng, unclamped=unclamped))[None]
        value = backbone_fape({"traj": far}, batch | {"use_clamped_fape": coin}, config)
        assert value.shape == (1, 1)
        loss[unclamped] = value.item()
    assert loss[0.0] <= 1.0 < loss[1.0]


def test_masking_in_training_hides_fifteen_percent_and_keeps_the_truth() -> None:
    """Masked positions are the targets; the network sees the truth in a tenth of them and in all others."""
    raw = random_raw(60, 80, gaps=0.0)
    config = load_config("synthetic_monomer")
    config.data.eval.max_msa_clusters = 64
    config.data.eval.masked_msa_replace_fraction = 0.15
    sampler = sampler_from_raw(raw, config, seed=1)
    hidden, shown, same, total = 0.0, 0.0, 0.0, 0
    clusters = monomer.num_clusters(config)
    for cycle in range(5):
        features = sampler.sample(cycle)
        assert features["true_msa"].shape == (clusters, 80)
        seen = features["msa_feat"][..., :23].argmax(-1)
        target = features["bert_mask"] > 0
        np.testing.assert_array_equal(seen[~target], features["true_msa"][~target])
        hidden, total = hidden + target.sum(), total + target.size
        shown += (seen[target] == 22).sum()
        same += (seen[target] == features["true_msa"][target]).sum()
        # A cluster's profile counts its centre as the network sees it: it gives no masked residue away.
        profile = features["msa_feat"][..., 25:48]
        assert np.take_along_axis(profile, seen[..., None], -1).min() > 0
        assert features["true_msa"].max() <= rc.gap_index
    assert hidden / total == pytest.approx(0.15, abs=0.01)
    assert shown / hidden == pytest.approx(0.7, abs=0.03)
    assert 0.1 < same / hidden < 0.2
    assert not np.array_equal(sampler.sample(0)["bert_mask"], sampler.sample(1)["bert_mask"])
