"""Features for the monomer networks: the deterministic stages equal the official ones, the random ones are fair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastfold.data.features import monomer, transforms
from fastfold.data.features.pipeline import FeatureSampler, featurize, sampler_from_raw
from fastfold.data.msa.msa import Msa
from fastfold.data.targets import Chain
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import model_config
from tests.helpers.feature_oracles import load, load_config, official_draw

NAME = "synthetic_monomer"
# Not for the network, or labels.
UNUSED = {"seq_length", "random_crop_to_size_seed"}


@pytest.fixture
def raw() -> dict[str, np.ndarray]:
    return load(NAME, "raw_features.npz")


@pytest.fixture
def config() -> Any:
    return load_config(NAME)


def random_raw(rows: int, length: int, seed: int = 0, gaps: float = 0.2) -> dict[str, np.ndarray]:
    """Raw features of a made-up family: each row differs from the query in its own share of columns."""
    rng = np.random.default_rng(seed)
    query = rng.integers(0, 20, length)
    other = rng.random((rows, length)) < rng.random((rows, 1)) * 0.9
    msa = np.where(other, rng.integers(0, 20, (rows, length)), query)
    msa = np.where(rng.random((rows, length)) < gaps, 21, msa)
    msa[0] = query
    return {
        "aatype": np.eye(21, dtype=np.int32)[transforms.to_restype_order(query)],
        "residue_index": np.arange(length),
        "between_segment_residues": np.zeros(length, np.int32),
        "msa": msa,
        "deletion_matrix_int": rng.poisson(0.2, (rows, length)),
    }


@pytest.mark.parametrize("name", [NAME, "monomer_ptm", "monomer_deep_msa"])
def test_static_features_equal_the_official_ones(name: str) -> None:
    """Atom maps, target features, masks and padded templates: exact in every iteration."""
    official = load(name)
    sampler = sampler_from_raw(load(name, "raw_features.npz"), load_config(name))
    assert sampler.num_residues == official["aatype"].shape[1]
    assert not sampler.is_multimer
    for key, value in sampler.static.items():
        assert value.dtype == official[key].dtype, key
        for iteration in official[key]:
            np.testing.assert_array_equal(value, iteration, err_msg=key)


@pytest.mark.parametrize("name", [NAME, "monomer_ptm"])
def test_clusters_equal_the_official_ones_for_the_rows_that_were_drawn(name: str) -> None:
    """Clustering, profiles, deletion means and extra features, with the official run's own rows and masks."""
    official = load(name)
    _, alignment = monomer.prepare(load(name, "raw_features.npz"), load_config(name))
    for cycle in range(len(official["aatype"])):
        wanted = {key: value[cycle] for key, value in official.items()}
        real = wanted["extra_msa_row_mask"] > 0
        features = monomer.cycle_features(alignment, official_draw(alignment, wanted))
        for key, value in features.items():
            expected = wanted[key][real] if key.startswith("extra_") else wanted[key]
            assert value.dtype == expected.dtype, key
            if value.dtype == np.int32:
                np.testing.assert_array_equal(value, expected, err_msg=key)
            else:
                np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6, err_msg=key)


def test_extra_rows_of_a_deep_alignment_have_the_official_deletion_features() -> None:
    """The official run had more rows than its raw features keep; rows in both must agree exactly."""
    name = "monomer_deep_msa"
    official = load(name)
    _, alignment = monomer.prepare(load(name, "raw_features.npz"), load_config(name))
    rows = {row.tobytes(): number for number, row in enumerate(alignment.msa)}
    compared = 0
    for cycle in range(len(official["aatype"])):
        for number, row in enumerate(official["extra_msa"][cycle].astype(np.uint8)):
            if row.tobytes() in rows:
                deletions = alignment.deletions[rows[row.tobytes()]]
                value = official["extra_deletion_value"][cycle, number]
                np.testing.assert_allclose(transforms.deletion_value(deletions), value, rtol=0, atol=1e-6)
                wanted = official["extra_has_deletion"][cycle, number]
                np.testing.assert_array_equal(transforms.has_deletion(deletions), wanted)
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("name", [NAME, "monomer_ptm", "monomer_deep_msa"])
def test_stacked_features_have_the_official_names_types_and_shapes(name: str) -> None:
    """Iteration by iteration what the official program gives its network; only padding of rows is left out."""
    official, config = load(name), load_config(name)
    raw = load(name, "raw_features.npz")
    stacked = sampler_from_raw(raw, config).stack(config.model.num_recycle + 1)
    labels = {
        key for key in official if key.startswith(("all_atom", "backbone", "rigidgroups", "chi", "pseudo"))
    }
    labels |= {key for key in official if "_gt_" in key or "ambiguous" in key} | {"resolution"}
    assert stacked.keys() == official.keys() - UNUSED - labels
    extra = min(official["extra_msa"].shape[1], len(raw["msa"]) - official["msa_feat"].shape[1])
    for key, value in stacked.items():
        shape = list(official[key].shape)
        if key.startswith("extra_"):
            shape[1] = extra
        assert list(value.shape) == shape, key
        assert value.dtype == official[key].dtype, key


def test_clustering_equals_its_definition() -> None:
    """Against plain loops over rows: first best centre, gaps and masked positions agree with nothing."""
    raw, config = random_raw(60, 15), load_config(NAME)
    _, alignment = monomer.prepare(raw, config)
    draw = monomer.draw_rows(np.random.default_rng(1), alignment, config)
    profile, deletion_mean = monomer.summarize_clusters(alignment, draw)
    members: list[list[int]] = [[] for _ in draw.clusters]
    for row in draw.extra:
        agree = [int(((alignment.msa[row] == center) & (center < 21)).sum()) for center in draw.msa]
        members[agree.index(max(agree))].append(row)
    for cluster, rows in enumerate(members):
        stacked = np.concatenate([draw.msa[cluster][None], alignment.msa[rows]])
        wanted = np.eye(23)[stacked].sum(axis=0) / (len(stacked) + 1e-6)
        np.testing.assert_allclose(profile[cluster], wanted, rtol=1e-6, atol=1e-7)
        deletions = alignment.deletions[[draw.clusters[cluster], *rows]].sum(axis=0) / (len(stacked) + 1e-6)
        np.testing.assert_allclose(deletion_mean[cluster], deletions, rtol=1e-6, atol=1e-7)


def test_the_query_is_always_the_first_centre_and_all_rows_are_used_once(raw: Any, config: Any) -> None:
    _, alignment = monomer.prepare(raw, config)
    for seed in range(20):
        draw = monomer.draw_rows(np.random.default_rng(seed), alignment, config)
        assert draw.clusters[0] == 0
        assert len(draw.clusters) == monomer.num_clusters(config) == 10
        assert sorted([*draw.clusters, *draw.extra]) == list(range(len(alignment.msa)))
        assert draw.num_extra == config.data.common.max_extra_msa
        np.testing.assert_array_equal(alignment.msa[0], alignment.msa[draw.clusters[0]])


def test_rows_are_drawn_evenly(config: Any) -> None:
    """Over 2,000 draws each row but the query is a centre, and an extra row, equally often."""
    _, alignment = monomer.prepare(random_raw(41, 4), config)
    center, extra = np.zeros(41), np.zeros(41)
    for seed in range(2000):
        draw = monomer.draw_rows(np.random.default_rng(seed), alignment, config)
        center[draw.clusters] += 1
        extra[draw.extra[: draw.num_extra]] += 1
    assert center[0] == 2000
    # 9 of 40 rows, standard deviation below 19; 12 of 40 rows, standard deviation below 21
    assert np.abs(center[1:] - 2000 * 9 / 40).max() < 90
    assert np.abs(extra[1:] - 2000 * 12 / 40).max() < 100


def test_masking_has_the_frequencies_of_the_paper(config: Any) -> None:
    """15% of the positions; of these 70% masked, 10% even, 10% from the profile, 10% unchanged."""
    config.data.eval.max_msa_clusters = 404
    _, alignment = monomer.prepare(random_raw(400, 200), config)
    draw = monomer.draw_rows(np.random.default_rng(7), alignment, config)
    true = alignment.msa[draw.clusters]
    assert draw.masked.mean() == pytest.approx(0.15, abs=0.005)
    np.testing.assert_array_equal(draw.msa[~draw.masked], true[~draw.masked])
    new, old = draw.msa[draw.masked], true[draw.masked]
    column = np.nonzero(draw.masked)[1]
    assert (new == 22).mean() == pytest.approx(0.7, abs=0.02)
    from_profile = alignment.profile[column]
    same = 0.1 + 0.1 * from_profile[np.arange(len(old)), old].mean() + 0.005 * (old < 20).mean()
    assert (new == old).mean() == pytest.approx(same, abs=0.01)
    # A gap can come from the profile or from the gap that was there, never from the even draw.
    gap = 0.1 * from_profile[:, 21].mean() + 0.1 * (old == 21).mean()
    assert (new == 21).mean() == pytest.approx(gap, abs=0.01)
    assert not (new == 20).any()  # unknown residues are in no profile here


def test_all_positions_stay_without_masking(raw: Any, config: Any) -> None:
    config.data.eval.masked_msa_replace_fraction = 0.0
    features = sampler_from_raw(raw, config).sample(0)
    assert features["bert_mask"].sum() == 0
    np.testing.assert_array_equal(features["msa_feat"][..., :23].argmax(-1), features["true_msa"])


def test_impossible_masking_probabilities_are_refused(raw: Any, config: Any) -> None:
    config.data.common.masked_msa.same_prob = 0.9
    with pytest.raises(ConfigError, match="more than 1"):
        sampler_from_raw(raw, config).sample(0)


def test_probabilities_that_sum_to_one_but_for_rounding_never_mask(raw: Any, config: Any) -> None:
    """0.3, 0.2 and 0.5 sum to 1 + 2e-16 in this order."""
    probabilities = config.data.common.masked_msa
    probabilities.uniform_prob, probabilities.profile_prob, probabilities.same_prob = 0.3, 0.2, 0.5
    assert 1.0 - 0.3 - 0.2 - 0.5 < 0.0
    features = sampler_from_raw(raw, config).sample(0)
    assert features["bert_mask"].any()
    assert not features["msa_feat"][..., 22].any()


def changes(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> set[str]:
    """Names of the features in which two samples differ."""
    return {name for name in a if not np.array_equal(a[name], b[name])}


def test_samples_follow_from_seed_cycle_and_ensemble_alone(raw: Any, config: Any) -> None:
    """The same numbers whatever was asked for before; other numbers for another seed, cycle or member."""
    first, second = (sampler_from_raw(raw, config, seed=3) for _ in range(2))
    sample = first.sample(2, 1)
    second.sample(0)
    assert not changes(sample, second.sample(2, 1))
    for other in (
        first.sample(1, 1),
        first.sample(2, 0),
        sampler_from_raw(raw, config, seed=4).sample(2, 1),
    ):
        assert {"msa_feat", "bert_mask", "extra_msa", "true_msa"} <= changes(sample, other)
        assert not changes(sample, other) & first.static.keys()


def test_stack_is_cycle_major(raw: Any, config: Any) -> None:
    sampler = sampler_from_raw(raw, config)
    stacked = sampler.stack(2, 3)
    for cycle in range(2):
        for ensemble in range(3):
            sample = sampler.sample(cycle, ensemble)
            assert not changes(sample, {key: value[3 * cycle + ensemble] for key, value in stacked.items()})


def test_without_resampling_all_cycles_share_their_rows(raw: Any, config: Any) -> None:
    config.data.common.resample_msa_in_recycling = False
    sampler = sampler_from_raw(raw, config)
    assert not changes(sampler.sample(0, 1), sampler.sample(2, 1))
    assert changes(sampler.sample(0, 1), sampler.sample(0, 0))


def test_a_negative_seed_is_refused(raw: Any, config: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        sampler_from_raw(raw, config, seed=-1)


def sample_alone(config: Any) -> FeatureSampler:
    return featurize([Chain("A", "MKTAYIX")], [([], [])], config)


def test_single_sequence_mode(config: Any) -> None:
    """One centre, one extra row that is wholly masked, and zero templates where the network wants templates."""
    features = sample_alone(config).sample(0)
    assert features["msa_feat"].shape == (1, 7, 49)
    assert features["extra_msa"].shape == (1, 7)
    assert features["extra_msa_mask"].sum() == features["extra_msa_row_mask"].sum() == 0
    assert features["template_all_atom_positions"].shape == (4, 7, 37, 3)
    for name in features:
        if name.startswith("template_"):
            assert not features[name].any(), name
    assert features["target_feat"][6].argmax() == 21  # domain break, then residue types: X is number 20
    # The cluster is its centre alone.
    np.testing.assert_allclose(features["msa_feat"][..., 25:48], features["msa_feat"][..., :23], atol=2e-6)


def test_networks_without_templates_get_none(config: Any) -> None:
    config.data.common.use_templates = False
    assert not [name for name in sample_alone(config).sample(0) if name.startswith("template_")]


def test_surplus_templates_are_left_out(raw: Any, config: Any) -> None:
    many = {
        name: np.tile(value, [3] + [1] * (value.ndim - 1)) if name.startswith("template_") else value
        for name, value in raw.items()
    }
    static = sampler_from_raw(many, config).static
    assert static["template_mask"].tolist() == [1.0] * 4
    np.testing.assert_array_equal(static["template_aatype"][:2], static["template_aatype"][2:])


def test_a_complex_for_a_monomer_network_is_a_clear_choice(config: Any) -> None:
    chains = [Chain("A", "MKT"), Chain("B", "MKT")]
    with pytest.raises(ConfigError, match=r"multimer network.*or fold its chains separately"):
        featurize(chains, [([], [])] * 2, config)


def test_arguments_that_do_not_belong_together_are_refused(raw: Any, config: Any) -> None:
    with pytest.raises(InputError, match="at least one chain"):
        featurize([], [], config)
    with pytest.raises(InputError, match="1 chains, but alignments for 0"):
        featurize([Chain("A", "MKT")], [], config)
    with pytest.raises(InputError, match="another sequence"):
        featurize([Chain("A", "MKT")], [([Msa(("MKA",), np.zeros((1, 3), int), ("q",))], [])], config)
    with pytest.raises(InputError, match="'msa'"):
        sampler_from_raw({name: raw[name] for name in raw if name != "msa"}, config)
    with pytest.raises(InputError, match="0 to 21"):
        sampler_from_raw(raw | {"msa": raw["msa"] + 1}, config)


ALIGNMENT = Msa(("MKT",), np.zeros((1, 3), int), ("q",))


@pytest.mark.parametrize("name", ["model_1_ptm", "model_1_multimer_v3"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alignments": [ALIGNMENT]}, "alignments of chain A must be two lists of Msa.* found Msa"),
        ({"alignments": [[ALIGNMENT]]}, "alignments of chain A must be two lists of Msa.* found list"),
        ({"alignments": [(ALIGNMENT, [])]}, "alignments of chain A must be two lists of Msa.* found tuple"),
        ({"alignments": [([ALIGNMENT], ALIGNMENT)]}, "alignments of chain A must be two lists of Msa"),
        ({"alignments": [(["query.a3m"], [])]}, "alignments of chain A must be two lists of Msa"),
        ({"alignments": [None]}, "alignments of chain A must be two lists of Msa.* found NoneType"),
        ({"alignments": None}, "alignments must be a list with a pair for each chain, found NoneType"),
        ({"chains": Chain("A", "MKT")}, "chains must be a list of Chain, found Chain"),
        ({"chains": "MKT"}, "chains must be a list of Chain, found str"),
        ({"chains": ["MKT"]}, "each of chains must be a Chain, found str"),
        ({"config": "model_1_ptm"}, "config must be the configuration of a network.* found str"),
        ({"templates": [3]}, "templates of chain A must be raw features or None, found int"),
        ({"seed": 1.5}, "seed must be a whole number, found 1.5"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    usual = {"chains": [Chain("A", "MKT")], "alignments": [([ALIGNMENT], [])], "config": model_config(name)}
    with pytest.raises(ConfigError, match=message):
        featurize(**usual | arguments)


def test_numbers_of_iterations_are_checked(config: Any) -> None:
    sampler = sample_alone(config)
    for call in (lambda: sampler.sample(-1), lambda: sampler.sample(0, 1.0), lambda: sampler.stack(0)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"cycle|ensemble"):
            call()


def test_rows_enter_in_the_order_of_the_alignments(config: Any) -> None:
    """featurize uses all alignments of the chain, first to last, and counts deletions of each row."""
    config.data.eval.max_msa_clusters, config.data.common.max_extra_msa = 7, 5
    one = Msa(("MKT", "MRT"), np.array([[0, 0, 0], [0, 3, 0]], np.int32), ("q", "a"))
    two = Msa(("MKT", "M-T"), np.zeros((2, 3), np.int32), ("q", "b"))
    features = featurize([Chain("A", "MKT")], [([one, two], [])], config).sample(0)
    rows = {tuple(row) for row in features["true_msa"]}
    assert rows == {(12, 11, 16), (12, 1, 16), (12, 21, 16)}
    arginine = int(np.flatnonzero(features["true_msa"][:, 1] == 1)[0])
    assert features["msa_feat"][arginine, 1, 23] == 1.0
    assert features["msa_feat"][arginine, 1, 24] == pytest.approx(0.5)  # 2/π · arctan(3/3)


def test_a_deep_alignment_is_counted_in_blocks_as_in_one() -> None:
    """Row blocks must not lose or repeat rows: 3,000 rows are more than any block."""
    raw, config = random_raw(3000, 6), load_config(NAME)
    _, alignment = monomer.prepare(raw, config)
    np.testing.assert_allclose(alignment.profile, np.eye(22)[alignment.msa].mean(axis=0), rtol=1e-6)
    draw = monomer.draw_rows(np.random.default_rng(0), alignment, config)
    ones = np.ones((3000, 6))
    score = transforms.agreement(draw.msa, ones[:10], alignment.msa, ones)
    wanted = ((alignment.msa[:, None] == draw.msa) & (draw.msa < 21)).sum(axis=-1)
    np.testing.assert_array_equal(score, wanted)
