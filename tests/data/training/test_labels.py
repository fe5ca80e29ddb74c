"""Labels: equal to the recorded official ones, consistent with each other, and harmless where atoms are missing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastfold.data.training.labels import structure_labels
from fastfold.errors import InputError
from fastfold.evoformer.losses import alphafold_loss
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import frames_to_atom14
from fastfold.protein.rigid import Rigid, quaternion_to_rotation
from tests.helpers.feature_oracles import load
from tests.helpers.networks import oracle_config, random_model

ORACLES = ("synthetic_monomer", "monomer_ptm")
NOT_RECORDED = {
    "rigidgroups_group_exists",
    "rigidgroups_group_is_ambiguous",
    "torsion_angles_sin_cos",
    "alt_torsion_angles_sin_cos",
    "torsion_angles_mask",
}


def _official(name: str = "synthetic_monomer") -> dict[str, np.ndarray]:
    return {key: value[-1] for key, value in load(name).items()}


# An entry of a frame comes from two normalised differences of atoms and a cross product: some six float32
# operations, each of which rounds by up to 2^-24, and processors differ in which of them they fuse.
FRAMES = 6 * 2**-24


def _labels(official: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    structure = official["aatype"], official["all_atom_positions"], official["all_atom_mask"]
    return structure_labels(*structure, resolution=float(official["resolution"]))


@pytest.mark.parametrize("name", ORACLES)
def test_labels_equal_the_official_ones(name: str) -> None:
    official = _official(name)
    labels = _labels(official)
    assert set(labels) - set(official) == NOT_RECORDED
    for key in set(labels) - NOT_RECORDED - {"backbone_affine_tensor"}:
        ours, theirs = labels[key], official[key]
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), key
        tolerance = {"rigidgroups_gt_frames": FRAMES, "rigidgroups_alt_gt_frames": FRAMES, "chi_angles": 1e-5}
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance.get(key, 0.0), err_msg=key)
    ours, theirs = labels["backbone_affine_tensor"], official["backbone_affine_tensor"]
    # A quaternion and its negative are one rotation; the eigenvector's sign is the linear algebra library's.
    sign = np.sign((ours[:, :4] * theirs[:, :4]).sum(-1, keepdims=True))
    np.testing.assert_allclose(ours[:, :4] * sign, theirs[:, :4], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ours[:, 4:], theirs[:, 4:])


def test_frames_rebuild_the_atoms() -> None:
    """Ideal side chains hung on the labelled frames lie on the labelled atoms."""
    labels = _labels(_official())
    flat = torch.from_numpy(labels["rigidgroups_gt_frames"])
    frames = Rigid(flat[..., :9].unflatten(-1, (3, 3)), flat[..., 9:])
    rebuilt = frames_to_atom14(torch.from_numpy(labels["aatype"]), frames).numpy()
    group = rc.restype_atom14_to_rigid_group[labels["aatype"]]
    known = labels["atom14_gt_exists"] * np.take_along_axis(labels["rigidgroups_gt_exists"], group, axis=1)
    distance = np.linalg.norm(rebuilt - labels["atom14_gt_positions"], axis=-1)[known > 0]
    assert len(distance) > 150
    assert distance.max() < 0.1


def test_backbone_frame_is_the_first_group() -> None:
    labels = _labels(_official())
    rotation = quaternion_to_rotation(torch.from_numpy(labels["backbone_affine_tensor"][:, :4])).numpy()
    known = labels["backbone_affine_mask"] > 0
    first = labels["rigidgroups_gt_frames"][:, 0, :9].reshape(-1, 3, 3)
    np.testing.assert_allclose(rotation[known], first[known], atol=2e-6)
    ca = labels["all_atom_positions"][:, rc.atom_order["CA"]]
    np.testing.assert_array_equal(labels["backbone_affine_tensor"][known, 4:], ca[known])


def test_alternative_labels_are_those_of_the_renamed_atoms() -> None:
    official = _official()
    labels = _labels(official)
    aatype = labels["aatype"]
    renamed = {key: official[key].copy() for key in ("all_atom_positions", "all_atom_mask")}
    for residue, slot in np.argwhere(rc.restype_atom14_is_ambiguous[aatype] > 0):
        other = rc.restype_atom14_renaming[aatype[residue], slot]
        source, target = rc.restype_atom14_to_atom37[aatype[residue], [slot, other]]
        for key, value in renamed.items():
            value[residue, target] = official[key][residue, source]
    exchanged = _labels(official | renamed)
    np.testing.assert_array_equal(exchanged["atom14_gt_positions"], labels["atom14_alt_gt_positions"])
    np.testing.assert_array_equal(exchanged["atom14_gt_exists"], labels["atom14_alt_gt_exists"])
    turned = (labels["rigidgroups_group_is_ambiguous"] * labels["rigidgroups_gt_exists"]) > 0
    assert set(aatype[turned.any(-1)]) == {rc.restype_order[letter] for letter in "DEFY"}
    both = turned & (exchanged["rigidgroups_gt_exists"] > 0)
    np.testing.assert_allclose(
        exchanged["rigidgroups_gt_frames"][both], labels["rigidgroups_alt_gt_frames"][both], atol=0.05
    )
    assert np.abs(exchanged["rigidgroups_gt_frames"] - labels["rigidgroups_gt_frames"])[both].max() > 1.0


@pytest.mark.parametrize("atom", ["N", "CA", "C", "O", "CB"])
def test_a_missing_atom_is_masked_wherever_it_is_needed(atom: str) -> None:
    official = _official()
    residue = 13  # an arginine or another long side chain: all atoms below are there
    whole = _labels(official)
    mask = official["all_atom_mask"].copy()
    assert mask[residue, [rc.atom_order[a] for a in ("N", "CA", "C", "O", "CB")]].all()
    mask[residue, rc.atom_order[atom]] = 0.0
    positions = official["all_atom_positions"].copy()
    positions[mask == 0] = np.nan
    labels = structure_labels(official["aatype"], positions, mask)
    assert all(np.isfinite(value).all() for value in labels.values())
    assert labels["backbone_affine_mask"][residue] == (atom in ("O", "CB"))
    assert labels["rigidgroups_gt_exists"][residue, 3] == (atom not in ("CA", "C", "O"))
    assert labels["rigidgroups_gt_exists"][residue, 4] == (atom not in ("CA", "CB"))
    assert labels["chi_mask"][residue, 0] == (atom not in ("N", "CA", "CB"))
    assert labels["pseudo_beta_mask"][residue] == (atom != "CB")
    assert labels["torsion_angles_mask"][residue + 1, 1] == whole["torsion_angles_mask"][residue + 1, 1] * (
        atom != "C"
    )
    assert labels["atom14_gt_exists"].sum() == whole["atom14_gt_exists"].sum() - 1
    others = np.arange(len(mask)) != residue
    for key in ("backbone_affine_mask", "rigidgroups_gt_exists", "chi_mask", "pseudo_beta_mask"):
        np.testing.assert_array_equal(labels[key][others], whole[key][others])


def test_gradients_are_finite_with_missing_atoms_and_unknown_residues() -> None:
    official = _official()
    aatype = official["aatype"].copy()
    aatype[4] = rc.unk_restype_index
    rng = np.random.default_rng(0)
    mask = official["all_atom_mask"] * (rng.random(official["all_atom_mask"].shape) < 0.7)
    mask[8:11] = 0.0
    mask[12] = np.eye(37)[rc.atom_order["CA"]]
    labels = structure_labels(aatype, official["all_atom_positions"], mask, resolution=2.0)
    features = {key: torch.from_numpy(np.asarray(value)) for key, value in (official | labels).items()}
    config = oracle_config()
    model = random_model(config)
    batch = {key: value[None] for key, value in features.items()}
    result = model(batch, num_recycles=0)
    loss, _ = alphafold_loss(result, {key: value[-1] for key, value in batch.items()}, config)
    loss.backward()
    assert torch.isfinite(loss)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(g).all() for g in gradients)


def test_unknown_residues_have_a_backbone_frame() -> None:
    official = _official()
    known = _labels(official)
    aatype = official["aatype"].copy()
    aatype[4] = rc.unk_restype_index
    labels = _labels(official | {"aatype": aatype})
    assert labels["backbone_affine_mask"][4] == 1.0
    np.testing.assert_array_equal(labels["backbone_affine_tensor"][4], known["backbone_affine_tensor"][4])
    assert labels["rigidgroups_group_exists"][4].tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
    assert not labels["atom14_gt_exists"][4].any()


def test_confidence_of_a_predicted_structure_goes_into_all_masks() -> None:
    official = _official()
    whole = _labels(official)
    half = _labels(official | {"all_atom_mask": official["all_atom_mask"] * 0.5})
    for key in ("all_atom_mask", "atom14_gt_exists", "rigidgroups_gt_exists", "pseudo_beta_mask"):
        np.testing.assert_array_equal(half[key], 0.5 * whole[key])
    np.testing.assert_array_equal(half["atom14_gt_positions"], whole["atom14_gt_positions"])


def test_unknown_resolution_is_zero() -> None:
    official = _official()
    labels = structure_labels(official["aatype"], official["all_atom_positions"], official["all_atom_mask"])
    assert labels["resolution"] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aatype": np.zeros(3, int)}, "has shape"),
        ({"aatype": np.full(28, 21)}, "0 to 20"),
        ({"all_atom_mask": np.ones((28, 14))}, "mask"),
        ({"all_atom_positions": np.full((28, 37, 3), np.inf)}, "atom N of residue 1 .* set its mask to 0"),
    ],
)
def test_bad_structures_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _labels(_official() | change)
