"""Samples of single chains: what is in them, that labels follow the crop, and what decides about them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfold.data.msa.msa import parse_a3m
from fastfold.data.training.sample import FEATURES, LABELS, SampleSettings, training_sample
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from tests.helpers.networks import oracle_config
from tests.helpers.sample_chains import alignment_rows, ca_trace, chain_structure

TREE = oracle_config()
CHAIN = chain_structure(0, 24, first=5)
OTHER_ROWS = 6
MSA = parse_a3m(
    f">q\n{CHAIN.sequence}\n"
    + "".join(f">{i}\n{CHAIN.sequence[:i] + 'W' + '-' * (23 - i)}\n" for i in range(OTHER_ROWS))
)
SETTINGS = SampleSettings(crop_size=10, cycles=2, block_deletion=False, unknown_resolution=2.0)
Sample = dict[str, np.ndarray]


def sample(settings: SampleSettings = SETTINGS, seed: int = 0, **options: float) -> Sample:
    return training_sample(CHAIN, [MSA], TREE, settings, np.random.default_rng(seed), **options)


def differing_rows(found: Sample) -> int:
    """Rows of the alignment that are not the chain itself, in the first iteration."""
    return len(np.unique(alignment_rows(found), axis=0)) - 1


def test_a_sample_has_what_network_and_losses_read() -> None:
    """Features with an axis of iterations, labels without, all of the same residues."""
    found = sample()
    for name in ("aatype", "residue_index", "target_feat", "seq_mask"):
        assert found[f"{FEATURES}{name}"].shape[:2] == (2, 10), name
    for name in ("msa_feat", "true_msa", "bert_mask", "extra_msa"):
        assert found[f"{FEATURES}{name}"].shape[::2][0] == 2, name
        assert found[f"{FEATURES}{name}"].shape[2] == 10, name
    labels = [
        "all_atom_positions",
        "backbone_affine_tensor",
        "rigidgroups_gt_frames",
        "chi_angles",
        "pseudo_beta",
    ]
    for name in labels:
        assert found[f"{LABELS}{name}"].shape[0] == 10, name
    assert found[f"{LABELS}resolution"] == 2.0
    assert sample(resolution=1.5)[f"{LABELS}resolution"] == 1.5
    assert {x.dtype for x in found.values()} <= {np.dtype(np.float32), np.dtype(np.int32)}


def test_labels_are_those_of_the_residues_in_the_crop() -> None:
    """Every crop is a piece without a gap, and the labels are the chain's at these residue numbers."""
    starts = set()
    for seed in range(12):
        found = sample(seed=seed)
        index = found[f"{FEATURES}residue_index"][0]
        rows = index - CHAIN.residue_index[0]
        np.testing.assert_array_equal(np.diff(index), 1)
        np.testing.assert_array_equal(found[f"{FEATURES}aatype"][1], found[f"{LABELS}aatype"])
        np.testing.assert_array_equal(found[f"{LABELS}aatype"], rc.sequence_to_aatype(CHAIN.sequence)[rows])
        np.testing.assert_array_equal(found[f"{LABELS}all_atom_positions"], CHAIN.positions[rows])
        np.testing.assert_array_equal(found[f"{LABELS}all_atom_mask"], CHAIN.mask[rows])
        starts.add(int(index[0]))
    assert len(starts) > 4


def test_a_short_chain_is_taken_whole() -> None:
    found = sample(replace(SETTINGS, crop_size=100))
    np.testing.assert_array_equal(found[f"{LABELS}all_atom_positions"], CHAIN.positions)


def test_the_generator_alone_decides() -> None:
    """The same generator gives the same sample to the bit, another one another sample."""
    deleting = replace(SETTINGS, block_deletion=True, single_sequence_probability=0.5)
    first, again, other = sample(deleting, 3), sample(deleting, 3), sample(deleting, 4)
    assert first.keys() == again.keys()
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert any(
        not np.array_equal(first[key], other[key]) for key in first if first[key].shape == other[key].shape
    )


def test_the_share_of_single_sequences() -> None:
    """Never, always, and half of the time; alone, every row of the alignment is the chain."""
    full = replace(SETTINGS, crop_size=24, cycles=1)
    for share, low, high in ((0.0, 0, 0), (1.0, 40, 40), (0.5, 10, 30)):
        settings = replace(full, single_sequence_probability=share)
        alone = sum(differing_rows(sample(settings, seed)) == 0 for seed in range(40))
        assert low <= alone <= high, share


def test_the_share_of_unclamped_samples() -> None:
    settings = replace(SETTINGS, cycles=1, unclamped_probability=0.5)
    clamped = sum(float(sample(settings, seed)[f"{LABELS}use_clamped_fape"]) for seed in range(40))
    assert 10 <= clamped <= 30


def test_blocks_of_the_alignment_are_deleted() -> None:
    full = replace(SETTINGS, crop_size=24, cycles=1)
    assert differing_rows(sample(full)) == OTHER_ROWS
    fewer = [differing_rows(sample(replace(full, block_deletion=True), seed)) for seed in range(8)]
    assert min(fewer) < OTHER_ROWS


def test_the_alignment_of_another_chain_is_refused() -> None:
    other = parse_a3m(f">q\n{'W' * 24}\n")
    with pytest.raises(InputError):
        training_sample(CHAIN, [other], TREE, SETTINGS, np.random.default_rng(0))


def test_a_trace_of_ca_atoms_is_refused() -> None:
    """It has no frames to learn from; the message names the chain and what to do."""
    with pytest.raises(InputError, match=r"chain 'A' .*N, CA and C.*remove the structure"):
        training_sample(ca_trace(CHAIN), [MSA], TREE, SETTINGS, np.random.default_rng(0))
