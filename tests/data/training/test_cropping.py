"""Crops: which residues the draws may choose, and that a crop commutes with making features and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.data.features import merging
from fastfold.data.features import raw as raw_features
from fastfold.data.features.pipeline import sampler_from_merged, sampler_from_raw
from fastfold.data.msa.msa import Msa
from fastfold.data.training import augmentation
from fastfold.data.training.augmentation import (
    contiguous_crop,
    contiguous_crop_of_chains,
    crop_features,
    sample_fape_clamp,
    spatial_crop,
)
from fastfold.data.training.labels import structure_labels
from fastfold.errors import InputError
from tests.helpers.feature_oracles import load, load_config

SEEDS = st.integers(0, 2**32 - 1)
CHAINS = st.lists(st.integers(1, 30), min_size=1, max_size=6)
SIZES = st.integers(1, 120)


def _chains(lengths: list[int]) -> np.ndarray:
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)


def _is_crop(indices: np.ndarray, length: int, size: int) -> None:
    assert len(indices) == min(length, size)
    assert (np.diff(indices) > 0).all()
    assert 0 <= indices[0] <= indices[-1] < length


@given(length=st.integers(1, 200), size=SIZES, seed=SEEDS, clamped=st.booleans())
@settings(deadline=None, max_examples=100)
def test_a_contiguous_crop_has_no_gap(length: int, size: int, seed: int, clamped: bool) -> None:
    indices = contiguous_crop(length, size, np.random.default_rng(seed), clamped=clamped)
    _is_crop(indices, length, size)
    assert (np.diff(indices) == 1).all()


def test_starts_are_even_for_clamped_samples_and_early_for_others() -> None:
    rng = np.random.default_rng(0)
    starts = {
        clamped: np.array([contiguous_crop(14, 10, rng, clamped=clamped)[0] for _ in range(4000)])
        for clamped in (True, False)
    }
    share = {clamped: np.bincount(value, minlength=5) / 4000 for clamped, value in starts.items()}
    np.testing.assert_allclose(share[True], 0.2, atol=0.03)
    # The upper end is 0 to 4 with probability 1/5 each, the start even below it.
    expected = [sum(1 / 5 / (end + 1) for end in range(start, 5)) for start in range(5)]
    np.testing.assert_allclose(share[False], expected, atol=0.03)


@given(lengths=CHAINS, size=SIZES, seed=SEEDS)
@settings(deadline=None, max_examples=200)
def test_a_crop_of_chains_is_one_piece_of_each(lengths: list[int], size: int, seed: int) -> None:
    asym_id = _chains(lengths)
    indices = contiguous_crop_of_chains(asym_id, size, np.random.default_rng(seed))
    _is_crop(indices, len(asym_id), size)
    for chain in np.unique(asym_id[indices]):
        assert (np.diff(indices[asym_id[indices] == chain]) == 1).all()
    if size >= len(asym_id):
        assert set(asym_id[indices]) == set(asym_id)


def test_every_residue_of_every_chain_can_be_in_a_crop() -> None:
    asym_id, rng = _chains([5, 9, 3]), np.random.default_rng(1)
    crops = [contiguous_crop_of_chains(asym_id, 8, rng) for _ in range(500)]
    assert (np.bincount(np.concatenate(crops), minlength=17) > 50).all()
    assert {len(np.unique(asym_id[crop])) for crop in crops} == {1, 2, 3}


@given(lengths=CHAINS, size=SIZES, seed=SEEDS, missing=st.floats(0, 1), spread=st.floats(1, 30))
@settings(deadline=None, max_examples=200)
def test_a_spatial_crop_has_the_right_size(
    lengths: list[int], size: int, seed: int, missing: float, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    asym_id = _chains(lengths)
    positions = rng.normal(size=(len(asym_id), 3)) * spread
    mask = (rng.random(len(asym_id)) >= missing).astype(np.float32)
    positions[mask == 0] = np.nan
    _is_crop(spatial_crop(asym_id, positions, mask, size, rng), len(asym_id), size)


def _two_strands(distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Two chains on a line, 30 residues each, 4 Å apart; the end of one faces the start of the other."""
    along = np.concatenate([np.arange(30) * 4.0, 29 * 4.0 + distance + np.arange(30) * 4.0])
    return _chains([30, 30]), np.stack([along, 0 * along, 0 * along], -1)


def test_a_spatial_crop_lies_around_an_interface() -> None:
    asym_id, positions = _two_strands(7.0)
    for seed in range(50):
        indices = spatial_crop(asym_id, positions, np.ones(60), 11, np.random.default_rng(seed))
        # At 10 Å only the two residues that face each other are at the interface; either may be the centre.
        assert indices.tolist() in (list(range(24, 35)), list(range(25, 36)))
        assert set(asym_id[indices]) == {1, 2}
    wide = {
        int(
            np.median(spatial_crop(asym_id, positions, np.ones(60), 5, np.random.default_rng(s), cutoff=16.0))
        )
        for s in range(100)
    }
    assert wide == {27, 28, 29, 30, 31, 32}


def test_unresolved_residues_are_no_interface_and_come_last() -> None:
    asym_id, positions = _two_strands(7.0)
    mask = np.ones(60)
    mask[29] = 0.0
    positions[29] = positions[30]
    positions -= positions[30]  # what is not resolved must not count as lying at the origin
    indices = spatial_crop(asym_id, positions, mask, 20, np.random.default_rng(0), cutoff=12.0)
    assert 29 not in indices
    assert set(asym_id[indices]) == {1, 2}
    assert spatial_crop(asym_id, positions, mask, 60, np.random.default_rng(0)).tolist() == list(range(60))


def test_without_an_interface_the_crop_is_contiguous() -> None:
    asym_id, positions = _two_strands(50.0)
    indices = spatial_crop(asym_id, positions, np.ones(60), 20, np.random.default_rng(5))
    np.testing.assert_array_equal(indices, contiguous_crop_of_chains(asym_id, 20, np.random.default_rng(5)))


def test_interfaces_of_a_large_complex_are_found_in_every_block() -> None:
    rng = np.random.default_rng(0)
    asym_id = _chains([300, 300])
    positions = rng.normal(size=(600, 3)) * 25
    mask = rng.random(600) < 0.9
    distance = np.linalg.norm(positions[:, None] - positions, axis=-1)
    near = (distance < 10.0) & (asym_id[:, None] != asym_id) & mask[:, None] & mask
    np.testing.assert_array_equal(
        augmentation._at_interface(asym_id, positions, mask, 10.0), near.any(axis=1)
    )


@pytest.mark.parametrize("size", [0, -3])
def test_a_crop_of_nothing_is_refused(size: int) -> None:
    with pytest.raises(InputError, match="at least one residue"):
        contiguous_crop(10, size, np.random.default_rng(0))


# ---- features ----


def _monomer() -> tuple[dict[str, np.ndarray], Any]:
    return load("synthetic_monomer", "raw_features.npz"), load_config("synthetic_monomer")


def _labels() -> dict[str, np.ndarray]:
    official = {key: value[-1] for key, value in load("synthetic_monomer").items()}
    structure = official["aatype"], official["all_atom_positions"], official["all_atom_mask"]
    return structure_labels(*structure, resolution=2.0)


def _complex_features() -> dict[str, np.ndarray]:
    sequences = ["ARNDCQEGHIL", "ARNDCQEGHIL", "KMFPSTW"]
    raw = [
        raw_features.sequence_features(s)
        | raw_features.msa_features([], s)
        | raw_features.template_features({}, len(s))
        for s in sequences
    ]
    return merging.merge_chains(raw, raw, sequences, min_rows=5)


def _everything() -> list[dict[str, np.ndarray]]:
    raw, config = _monomer()
    alignment = raw_features.msa_features(
        [Msa(("ACD", "AC-"), ((0, 0, 0), (0, 1, 0)), ("query", "tr|A0A0K0|A_9STAP"))], "ACD"
    )
    official = load("synthetic_multimer")
    config_of_complex = load_config("synthetic_multimer")
    coin = {"use_clamped_fape": sample_fape_clamp(np.random.default_rng(0))}
    return [
        raw,
        alignment | raw_features.sequence_features("ACD"),
        sampler_from_raw(raw, config).sample(0) | _labels() | coin,
        official,
        _complex_features(),
        sampler_from_merged(official, config_of_complex).sample(0),
    ]


@pytest.mark.parametrize("case", range(6))
def test_every_axis_of_residues_is_cropped(case: int) -> None:
    """No feature of any stage is unknown, and an axis that has as many entries as there are residues is one."""
    features = _everything()[case]
    length = features["residue_index"].shape[0]
    indices = np.array([0, 2])
    cropped = crop_features(features, indices)
    assert set(cropped) == set(features)
    for name, value in features.items():
        axes = [axis for axis, size in enumerate(value.shape) if size == length]
        if name == "seq_length":
            assert (cropped[name] == 2).all()
        elif augmentation.RESIDUE_AXIS.get(name, axes[0] if axes else None) is None:
            np.testing.assert_array_equal(cropped[name], value)
        else:
            axis = augmentation.RESIDUE_AXIS.get(name, 0)
            assert axis in axes, name
            np.testing.assert_array_equal(
                cropped[name], value[(slice(None),) * axis + (indices,)], err_msg=name
            )
        assert cropped[name].dtype == value.dtype, name
    if case != 1:  # three residues: other axes have this size too
        untouched = [n for n, v in features.items() if length in v.shape and cropped[n].shape == v.shape]
        assert not untouched


def test_official_features_with_a_leading_axis_of_cycles() -> None:
    official = load("synthetic_monomer")
    indices = np.array([3, 4, 9])
    stacked = crop_features(official, indices, leading=1)
    for cycle in range(2):
        single = crop_features({name: value[cycle] for name, value in official.items()}, indices)
        for name, value in single.items():
            np.testing.assert_array_equal(stacked[name][cycle], value, err_msg=name)


def test_cropped_static_features_are_those_of_the_cropped_chain() -> None:
    raw, config = _monomer()
    indices = np.arange(4, 19)
    whole = sampler_from_raw(raw, config).static
    part = sampler_from_raw(crop_features(raw, indices), config).static
    cropped = crop_features(whole, indices)
    assert set(part) == set(cropped)
    for name, value in part.items():
        np.testing.assert_array_equal(value, cropped[name], err_msg=name)
    assert part["residue_index"].tolist() == indices.tolist()


def test_cropped_static_features_are_those_of_the_cropped_complex() -> None:
    merged, config = load("synthetic_multimer"), load_config("synthetic_multimer")
    indices = contiguous_crop_of_chains(merged["asym_id"], 30, np.random.default_rng(2))
    part = sampler_from_merged(crop_features(merged, indices), config).static
    for name, value in crop_features(sampler_from_merged(merged, config).static, indices).items():
        np.testing.assert_array_equal(part[name], value, err_msg=name)


def test_cropped_labels_are_those_of_the_cropped_structure() -> None:
    labels = _labels()
    indices = np.array([2, 3, 4, 5, 11, 12, 13])
    part = structure_labels(
        *(labels[name][indices] for name in ("aatype", "all_atom_positions", "all_atom_mask")), resolution=2.0
    )
    for name, value in crop_features(labels, indices).items():
        if "torsion_angles" in name:  # pre-omega and phi need the residue before: it is another one at a cut
            value, part[name] = value[:, 2:], part[name][:, 2:]
        np.testing.assert_allclose(part[name], value, atol=1e-6, err_msg=name)


def test_a_feature_of_unknown_layout_is_refused() -> None:
    with pytest.raises(InputError, match="'novel' cannot be cropped"):
        crop_features({"aatype": np.zeros(4), "novel": np.zeros(4)}, np.array([0]))


@pytest.mark.parametrize(
    ("features", "indices", "message"),
    [
        (
            {"aatype": np.zeros(4), "seq_mask": np.zeros(5)},
            [0],
            "'aatype' has 4 residues, but 'seq_mask' has 5",
        ),
        ({"aatype": np.zeros(4)}, [1, 4], "1 to 4 of 4"),
        ({"aatype": np.zeros(4)}, [-1, 2], "-1 to 2 of 4"),
        ({"msa": np.zeros(4)}, [0], "expected an axis of residues"),
    ],
)
def test_crops_that_do_not_fit_are_refused(
    features: dict[str, np.ndarray], indices: list[int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        crop_features(features, np.array(indices))
