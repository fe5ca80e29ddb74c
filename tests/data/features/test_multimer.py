"""Features for the multimer networks: clustering by its definition, fair draws, and the facade for complexes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastfold.data.features import multimer
from fastfold.data.features.pipeline import featurize, sampler_from_merged
from fastfold.data.features.transforms import Alignment, RandomDraw, msa_profile
from fastfold.data.msa.msa import Msa
from fastfold.data.targets import Chain
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from tests.helpers.feature_oracles import load, load_config

NAME = "synthetic_multimer"


@pytest.fixture
def merged() -> dict[str, np.ndarray]:
    return load(NAME)


@pytest.fixture
def config() -> Any:
    return load_config(NAME)


def official_clusters(alignment: Alignment, draw: RandomDraw) -> tuple[np.ndarray, np.ndarray]:
    """The official formulas, written out over dense arrays in float64."""
    center_mask, row_mask = alignment.mask[draw.clusters], alignment.mask[draw.extra]
    centers = np.eye(23)[draw.msa] * center_mask[..., None]
    rows = np.eye(23)[alignment.msa[draw.extra]] * row_mask[..., None]
    weights = np.array([1.0] * 21 + [0.0, 0.0])
    logits = 1e3 * np.einsum("nrc,mrc->nm", centers * weights, rows)
    assignment = np.exp(logits - logits.max(axis=0))
    assignment /= assignment.sum(axis=0)
    assignment *= center_mask @ row_mask.T
    count = assignment.sum(axis=1) + 1.0
    profile = (np.einsum("nm,mrc->nrc", assignment, rows) + centers) / count[:, None, None]
    deletions = assignment @ (row_mask * alignment.deletions[draw.extra]) + alignment.deletions[draw.clusters]
    return profile, deletions / count[:, None]


@pytest.mark.parametrize("name", [NAME, "multimer_homodimer"])
def test_deterministic_features_follow_the_official_formulas(name: str) -> None:
    """Rows in the order given, nothing masked: all 49 channels and the extra features."""
    merged, config = load(name), load_config(name)
    sampler = sampler_from_merged(merged, config, deterministic=True)
    features = sampler.sample(0)
    _, alignment = multimer.prepare(merged, config)
    draw = multimer.rows_in_order(alignment, config)
    profile, deletion_mean = official_clusters(alignment, draw)
    options = config.model.embeddings_and_evoformer
    first, last = options.num_msa, options.num_msa + options.num_extra_msa
    deletions = merged["deletion_matrix"][:last]
    value = np.arctan(deletions / 3.0) * 2.0 / np.pi
    expected = {
        "msa_feat": np.concatenate(
            [
                np.eye(23)[merged["msa"][:first]],
                np.clip(deletions, 0, 1)[:first, :, None],
                value[:first, :, None],
                profile,
                (np.arctan(deletion_mean / 3.0) * 2.0 / np.pi)[..., None],
            ],
            axis=-1,
        ),
        "msa_mask": merged["msa_mask"][:first],
        "true_msa": merged["msa"][:first],
        "bert_mask": np.zeros((first, sampler.num_residues)),
        "extra_msa": merged["msa"][first:last],
        "extra_msa_mask": merged["msa_mask"][first:last],
        "extra_has_deletion": np.clip(deletions, 0, 1)[first:],
        "extra_deletion_value": value[first:],
    }
    assert features.keys() == expected.keys() | sampler.static.keys()
    for key, wanted in expected.items():
        np.testing.assert_allclose(features[key], wanted, rtol=0, atol=1e-6, err_msg=key)
        assert features[key].dtype == (np.int32 if key in ("true_msa", "extra_msa") else np.float32), key
    for key, again in sampler.sample(1).items():
        np.testing.assert_array_equal(again, features[key], err_msg=key)


@pytest.mark.parametrize("deterministic", [True, False])
def test_centres_stand_for_their_clusters_without_profiles(deterministic: bool) -> None:
    """As in ColabFold's network: masked residues and deletions of the centres themselves, and all else as before."""
    merged, config = load(NAME), load_config(NAME)
    config.model.embeddings_and_evoformer.masked_msa.replace_fraction = 0.15
    profiled = sampler_from_merged(merged, config, deterministic=deterministic).sample(0)
    config.model.embeddings_and_evoformer.use_cluster_profile = False
    features = sampler_from_merged(merged, config, deterministic=deterministic).sample(0)
    feat = features["msa_feat"]
    np.testing.assert_array_equal(feat[..., 25:48], profiled["msa_feat"][..., :23])
    np.testing.assert_array_equal(feat[..., 48], profiled["msa_feat"][..., 24])
    assert (feat[..., 25:48].sum(-1) == 1).all()
    assert deterministic or (feat[..., 47] == 1).any()  # masked
    assert np.abs(feat[..., 25:] - profiled["msa_feat"][..., 25:]).max() > 0.1
    np.testing.assert_array_equal(feat[..., :25], profiled["msa_feat"][..., :25])
    for name in features.keys() - {"msa_feat"}:
        np.testing.assert_array_equal(features[name], profiled[name], err_msg=name)


@pytest.mark.parametrize("name", [NAME, "multimer_homodimer"])
def test_static_features_are_those_of_the_complex(name: str) -> None:
    merged, config = load(name), load_config(name)
    static = sampler_from_merged(merged, config).static
    for key in ("aatype", "residue_index", "asym_id", "entity_id", "sym_id"):
        np.testing.assert_array_equal(static[key], merged[key], err_msg=key)
        assert static[key].dtype == np.int32
    for key in ("seq_mask", "template_aatype", "template_all_atom_positions", "template_all_atom_mask"):
        np.testing.assert_array_equal(static[key], merged[key], err_msg=key)
    np.testing.assert_array_equal(static["target_feat"], np.eye(21)[merged["aatype"]])
    np.testing.assert_array_equal(static["atom37_atom_exists"], rc.restype_atom37_mask[merged["aatype"]])


def random_alignment(rows: int, length: int, seed: int = 0) -> Alignment:
    """Rows that share some residues with each other, few enough for ties, with masks in all places."""
    rng = np.random.default_rng(seed)
    msa = rng.choice(np.array([0, 1, 2, 20, 21], np.uint8), (rows, length))
    mask = (rng.random((rows, length)) < 0.9).astype(np.float32)
    mask[rng.random(rows) < 0.2] = 0.0
    mask[0] = 1.0
    bias = np.zeros(rows, np.float32)
    bias[0] = 1.0
    return Alignment(
        msa=msa,
        deletions=rng.poisson(0.5, (rows, length)).astype(np.float32),
        mask=mask,
        bert_mask=(rng.random((rows, length)) < 0.8).astype(np.float32),
        cluster_bias=bias,
        profile=msa_profile(msa, mask),
    )


@pytest.mark.parametrize("seed", range(10))
def test_soft_clusters_equal_their_definition(seed: int, config: Any) -> None:
    """Ties are shared in equal parts and masked positions count for nothing, whatever the masks."""
    config.model.embeddings_and_evoformer.masked_msa.replace_fraction = 0.3
    alignment = random_alignment(rows=250, length=7, seed=seed)
    draw = multimer.draw_rows(np.random.default_rng(seed), alignment, config)
    profile, deletion_mean = multimer.summarize_clusters(alignment, draw)
    wanted_profile, wanted_mean = official_clusters(alignment, draw)
    np.testing.assert_allclose(profile, wanted_profile, rtol=0, atol=1e-6)
    np.testing.assert_allclose(deletion_mean, wanted_mean, rtol=1e-5, atol=1e-6)


def test_the_profile_leaves_padding_out() -> None:
    alignment = random_alignment(rows=30, length=5)
    codes = np.eye(22)[alignment.msa] * alignment.mask[..., None]
    np.testing.assert_allclose(alignment.profile, codes.sum(0) / alignment.mask.sum(0)[:, None], rtol=1e-6)


def test_biased_rows_come_first_and_padding_last(config: Any) -> None:
    """The queries of all chains are centres in every draw; wholly masked rows are drawn after all real ones."""
    alignment = random_alignment(rows=40, length=6)
    bias = np.zeros(40, np.float32)
    bias[[0, 17, 33]] = 1.0
    mask = alignment.mask.copy()
    mask[[0, 17, 33]] = 1.0
    alignment = replace(alignment, cluster_bias=bias, mask=mask)
    real = mask.any(axis=1)
    for seed in range(30):
        draw = multimer.draw_rows(np.random.default_rng(seed), alignment, config)
        assert set(draw.clusters[:3]) == {0, 17, 33}
        assert sorted([*draw.clusters, *draw.extra]) == list(range(40))
        order = real[np.concatenate([draw.clusters, draw.extra])]
        assert (np.diff(order.astype(int)) <= 0).all()
        assert draw.num_extra == config.model.embeddings_and_evoformer.num_extra_msa


def test_unbiased_rows_are_drawn_evenly(config: Any) -> None:
    """Over 2,000 draws each real row but the query is a centre equally often."""
    alignment = multimer.drop_padding(random_alignment(rows=50, length=3))
    rows = len(alignment.msa)
    center = np.zeros(rows)
    for seed in range(2000):
        draw = multimer.draw_rows(np.random.default_rng(seed), alignment, config)
        center[draw.clusters] += 1
    assert center[0] == 2000
    share = 9 / (rows - 1)
    assert np.abs(center[1:] - 2000 * share).max() < 5 * np.sqrt(2000 * share * (1 - share))


def test_masking_keeps_to_real_positions(config: Any) -> None:
    """15% of them are masked; only those inside of the blocks' diagonal become training targets."""
    options = config.model.embeddings_and_evoformer
    options.num_msa, options.masked_msa.replace_fraction = 250, 0.15
    alignment = random_alignment(rows=300, length=120)
    draw = multimer.draw_rows(np.random.default_rng(0), alignment, config)
    mask = alignment.mask[draw.clusters] > 0
    assert not draw.masked[~mask].any()
    assert not draw.msa[~mask].any()
    assert draw.masked[mask].mean() == pytest.approx(0.15, abs=0.01)
    assert (draw.msa[draw.masked] == 22).mean() == pytest.approx(0.7, abs=0.03)
    kept = mask & ~draw.masked
    np.testing.assert_array_equal(draw.msa[kept], alignment.msa[draw.clusters][kept])
    bert_mask = multimer.cycle_features(alignment, draw, config)["bert_mask"]
    np.testing.assert_array_equal(bert_mask, draw.masked * alignment.bert_mask[draw.clusters])
    assert 0 < bert_mask.sum() < draw.masked.sum()


def test_padding_rows_change_nothing_but_the_size(merged: Any, config: Any) -> None:
    """The 64 rows of the official file hold 41 real ones; without the others the network sees the same."""
    config.model.embeddings_and_evoformer.num_msa = 50
    config.model.embeddings_and_evoformer.num_extra_msa = 20
    features = sampler_from_merged(merged, config).sample(0)
    assert features["msa_feat"].shape[0] == 41
    assert features["extra_msa"].shape[0] == 1  # a stand-in, wholly masked
    assert not features["extra_msa_mask"].any()
    in_order = sampler_from_merged(merged, config, deterministic=True).sample(0)
    assert in_order["msa_feat"].shape[0] == 50
    rows = {row.tobytes() for row in in_order["true_msa"][:41]}
    assert {row.tobytes() for row in features["true_msa"]} == rows


def test_samples_follow_from_seed_and_cycle_alone(merged: Any, config: Any) -> None:
    config.model.embeddings_and_evoformer.masked_msa.replace_fraction = 0.15

    def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], key: str) -> bool:
        return np.array_equal(a[key], b[key])

    sampler = sampler_from_merged(merged, config, seed=5)
    sample = sampler.sample(1)
    again = sampler_from_merged(merged, config, seed=5).sample(1)
    assert all(same(sample, again, key) for key in sample)
    for other in (sampler.sample(0), sampler.sample(1, 1), sampler_from_merged(merged, config).sample(1)):
        for key in ("msa_feat", "bert_mask", "true_msa", "extra_msa"):
            assert not same(sample, other, key), key
    np.testing.assert_array_equal(sample["true_msa"][0], merged["msa"][0])
    config.model.resample_msa_in_recycling = False
    frozen = sampler_from_merged(merged, config, seed=5)
    assert all(same(frozen.sample(0), frozen.sample(1), key) for key in sample)


def msa_of(*rows: str, species: str = "") -> Msa:
    names = ("query", *(f"tr|A0A0K0|A0A0K0_{species}{i}" for i in range(1, len(rows))))
    return Msa(rows, np.zeros((len(rows), len(rows[0])), np.int32), names)


def test_a_complex_from_chains_and_alignments(config: Any) -> None:
    """B, A, A: copies share the first one's alignment, different chains are paired, and the order is told."""
    chains = [Chain("A", "WWW"), Chain("B", "MK"), Chain("C", "MK")]
    alignments = [
        ([msa_of("WWW", "WCW")], [msa_of("WWW", "WHW", species="SP")]),
        ([msa_of("MK", "RK")], [msa_of("MK", "MR", species="SP")]),
        ([], []),
    ]
    sampler = featurize(chains, alignments, config)
    assert sampler.is_multimer
    assert sampler.num_residues == 7
    assert sampler.chain_order == (0, 1, 2)
    features = sampler.sample(0)
    assert features["entity_id"].tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert features["sym_id"].tolist() == [1, 1, 1, 1, 1, 2, 2]
    letters = (*rc.restypes_with_x, "-")
    rows = ["".join(letters[i] for i in row) for row in features["true_msa"]]
    assert rows[0] == "WWWMKMK"
    assert sorted(rows[1:]) == ["---RKRK", "WCW----", "WHWMRMR"]
    assert features["template_aatype"].shape == (4, 7)
    assert not features["template_all_atom_mask"].any()

    reordered = featurize([chains[1], chains[0], chains[2]], [([], [])] * 3, config)
    assert reordered.chain_order == (0, 2, 1)
    assert rc.aatype_to_sequence(reordered.static["aatype"]) == "MKMKWWW"


def test_one_chain_for_the_multimer_network(config: Any) -> None:
    features = featurize([Chain("A", "MKX")], [([], [])], config).sample(0)
    assert features["msa_feat"].shape == (1, 3, 49)
    assert features["target_feat"].argmax(-1).tolist() == [12, 11, 20]
    assert features["asym_id"].tolist() == [1, 1, 1]


def test_templates_of_a_chain_stay_with_that_chain(config: Any) -> None:
    templates = {
        "template_aatype": np.eye(22)[np.array([[1, 21]])],  # HHblits ids: cysteine, gap
        "template_all_atom_positions": np.ones((1, 2, 37, 3)),
        "template_all_atom_masks": np.ones((1, 2, 37)),
        "template_sum_probs": np.ones((1, 1)),
    }
    chains = [Chain("A", "WWW"), Chain("B", "MK")]
    static = featurize(chains, [([], [])] * 2, config, templates=[None, templates]).static
    assert static["template_aatype"].tolist() == [[0, 0, 0, 4, 21]] + [[0] * 5] * 3
    assert static["template_all_atom_mask"][0, :, 0].tolist() == [0, 0, 0, 1, 1]


def test_templates_of_several_chains_share_a_frame(config: Any) -> None:
    """A shared frame is a negative number; all other templates are of their chain alone."""
    one = {
        "template_aatype": np.eye(22)[np.array([[1, 21]] * 2)],
        "template_all_atom_positions": np.ones((2, 2, 37, 3)),
        "template_all_atom_masks": np.ones((2, 2, 37)),
        "template_sum_probs": np.ones((2, 1)),
        "template_frame": np.array([3, 0]),
    }
    chains = [Chain("A", "MK"), Chain("B", "MW"), Chain("C", "WWW")]
    static = featurize(chains, [([], [])] * 3, config, templates=[one, one, None]).static
    assert static["template_frame"].tolist() == [
        [-3] * 4 + [3] * 3,
        *[[1, 1, 2, 2, 3, 3, 3]] * 3,
    ]
    assert static["template_frame"].dtype == np.int32
    without = featurize(chains, [([], [])] * 3, config, templates=[None] * 3).static
    assert "template_frame" not in without
    with pytest.raises(InputError, match="template_frame"):
        featurize(chains[:1], [([], [])], config, templates=[one | {"template_frame": np.array([1])}])


def test_malformed_merged_features_are_refused(merged: Any, config: Any) -> None:
    without = {name: value for name, value in merged.items() if name != "template_all_atom_mask"}
    with pytest.raises(InputError, match="template_all_atom_mask"):
        sampler_from_merged(without, config)
    config.model.embeddings_and_evoformer.template.enabled = False
    assert "template_aatype" not in sampler_from_merged(without, config).static
    with pytest.raises(InputError, match=r"'msa'.*0 to 21"):
        sampler_from_merged(merged | {"msa": merged["msa"] + 5}, config)
    with pytest.raises(InputError, match="asym_id"):
        sampler_from_merged(merged | {"asym_id": merged["asym_id"][1:]}, config)
