"""Interface scores on cases worked out by hand, and what is said where a score has no meaning."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface import (
    ChainConfidence,
    directed_scores,
    interface_contacts,
    interface_scores,
)
from fastfold.protein.metrics.interface.pair_scores import CONTACT_SCORES, contact_points

CB, CA = rc.atom_order["CB"], rc.atom_order["CA"]


def atoms(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and mask of residues that have a CB alone."""
    positions, mask = np.zeros((len(points), 37, 3), np.float32), np.zeros((len(points), 37), np.float32)
    positions[:, CB], mask[:, CB] = points, 1.0
    return positions, mask


def two_chains(gap: float = 5.0) -> dict[str, np.ndarray]:
    """Chains of 3 and 2 residues on parallel lines ``gap`` Å apart, 10 Å between neighbours."""
    points = np.array([[0, 0, 0], [10, 0, 0], [20, 0, 0], [0, gap, 0], [10, gap, 0]], np.float32)
    positions, mask = atoms(points)
    return {
        "chain_index": np.array([0, 0, 0, 1, 1]),
        "atom_positions": positions,
        "atom_mask": mask,
        "plddt": np.array([90.0, 80.0, 10.0, 70.0, 60.0]),
    }


def error(rows: list[list[float]]) -> np.ndarray:
    """``[5, 5]`` with these errors of chain B aligned on A; 20 Å otherwise."""
    pae = np.full((5, 5), 20.0)
    pae[:3, 3:] = rows
    return pae


def test_definitions_by_hand() -> None:
    """Lengths under 27 have a d0 of 1 Å."""
    scores = directed_scores(np.array([[2.0, 14.9], [15.0, 3.0], [30.0, 30.0]]))
    first, second = (1 / 5 + 1 / (1 + 14.9**2)) / 2, 1 / 10
    np.testing.assert_allclose(scores.ipsae_d0res_by_residue, [first, second, 0.0])
    assert scores.ipsae_d0res == scores.ipsae_d0dom == pytest.approx(first)
    assert scores.iptm_d0chn == pytest.approx(first)
    assert scores.n0res_by_residue.tolist() == [2, 1, 0]
    assert (scores.n0chn, scores.n0dom, scores.num_pairs) == (5, 4, 3)
    assert (scores.aligned_residues, scores.scored_residues) == (2, 2)
    assert scores.lis == pytest.approx((10 / 12 + 9 / 12) / 2)


def test_variants_part_where_lengths_do() -> None:
    """60 partners of 200: d0 of the residue is smaller than that of both chains."""
    pae = np.full((100, 200), 25.0)
    pae[:40, :60] = 4.0

    def d0(length: int) -> float:
        return 1.24 * (length - 15) ** (1 / 3) - 1.8

    scores = directed_scores(pae)
    assert scores.ipsae_d0res == pytest.approx(1 / (1 + (4 / d0(60)) ** 2))
    assert scores.ipsae_d0dom == pytest.approx(1 / (1 + (4 / d0(100)) ** 2))
    assert scores.ipsae_d0chn == pytest.approx(1 / (1 + (4 / d0(300)) ** 2))
    expected = (60 / (1 + (4 / d0(300)) ** 2) + 140 / (1 + (25 / d0(300)) ** 2)) / 200
    assert scores.iptm_d0chn == pytest.approx(expected)


def test_contacts_by_hand() -> None:
    case = two_chains()
    found = interface_scores(**case, pae=error([[2, 9], [9, 4], [9, 9]]))
    pair = found["pairs"]["A-B"]
    assert pair["contacts"] == 2  # 5 Å apart; the diagonals are 11.2 Å
    assert pair["interface_residues"] == [2, 2]
    assert pair["interface_plddt"] == pytest.approx((90 + 80 + 70 + 60) / 4)
    assert pair["interface_pae"] == pytest.approx(((2 + 4) / 2 + 20) / 2)
    assert pair["pdockq"] == pytest.approx(
        0.724 / (1 + math.exp(-0.052 * (75 * math.log10(2) - 152.611))) + 0.018
    )
    sure = (1 / (1 + 0.2**2) + 1 / (1 + 0.4**2)) / 2
    there = 1.31 / (1 + math.exp(-0.075 * (75 * sure - 84.733))) + 0.005
    assert pair["directions"]["A-B"]["pdockq2"] == pair["pdockq2"] == pytest.approx(there)
    assert pair["directions"]["B-A"]["pdockq2"] < there
    assert pair["directions"]["A-B"]["near_residues"] == [3, 2]
    assert pair["directions"]["B-A"]["near_pairs"] == 0


def test_contact_at_the_distance_counts_and_one_beyond_it_does_not() -> None:
    """Of positions as files hold them: in float32 the distance may be a little more."""
    assert interface_scores(**two_chains(8.0))["pairs"]["A-B"]["contacts"] == 2
    assert interface_scores(**two_chains(8.001))["pairs"]["A-B"]["contacts"] == 0
    shifted = two_chains(8.0)
    shifted["atom_positions"] += np.float32(0.1)
    assert interface_scores(**shifted)["pairs"]["A-B"]["contacts"] == 2


def test_residues_touch_by_cb_or_ca_or_not_at_all() -> None:
    positions, mask = atoms(np.zeros((3, 3), np.float32))
    positions[:, CA] = [[1, 2, 3], [9, 5, 6], [7, 8, 9]]
    mask[0, CA], mask[1:, CB], mask[1, CA] = 1.0, 0.0, 1.0
    points = contact_points(positions, mask)
    np.testing.assert_array_equal(points[:2], [[0, 0, 0], [9, 5, 6]])
    assert np.isnan(points[2]).all()
    assert len(interface_contacts(points, points)) == 2
    assert len(interface_contacts(points[2:], points)) == 0


def test_contacts_are_found_in_blocks(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    first, second = rng.uniform(0, 30, (40, 3)), rng.uniform(0, 30, (30, 3))
    whole = interface_contacts(first, second)
    monkeypatch.setattr("fastfold.protein.metrics.interface.pair_scores._BLOCK", 64)
    cut = interface_contacts(first, second)
    assert len(whole) > 20
    np.testing.assert_array_equal(whole.first, cut.first)
    np.testing.assert_array_equal(whole.second, cut.second)
    near = np.argwhere(np.linalg.norm(first[:, None] - second, axis=-1) <= 8.0)
    np.testing.assert_array_equal(np.stack([cut.first, cut.second], 1), near)


def test_a_score_that_a_direction_lacks_is_none_for_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTACT_SCORES, "pdockq2", lambda *_: None)
    pair = interface_scores(**two_chains(), pae=np.full((5, 5), 5.0))["pairs"]["A-B"]
    assert pair["pdockq2"] is None
    assert pair["ipsae"] == max(one["ipsae"] for one in pair["directions"].values())


def test_chains_apart_have_no_means_and_scores_of_zero() -> None:
    pair = interface_scores(**two_chains(400.0), pae=np.full((5, 5), 31.0))["pairs"]["A-B"]
    assert pair["contacts"] == 0
    assert pair["interface_plddt"] is None
    assert pair["interface_pae"] is None
    assert pair["pdockq"] == pair["pdockq2"] == pair["ipsae"] == pair["ipsae_d0dom"] == pair["lis"] == 0.0
    assert 0.0 < pair["iptm_d0chn"] < 0.01


def test_without_aligned_errors_contacts_alone_are_scored() -> None:
    found = interface_scores(**two_chains())
    pair = found["pairs"]["A-B"]
    assert pair["pdockq"] > 0.018
    assert found["ipsae_max"] is None
    absent = ("ipsae", "ipsae_d0chn", "ipsae_d0dom", "iptm_d0chn", "pdockq2", "lis", "interface_pae", "iptm")
    assert [pair[key] for key in (*absent, "actifptm", "directions")] == [None] * 10


def test_one_chain_has_no_pairs() -> None:
    case = two_chains() | {"chain_index": np.zeros(5, int)}
    confidence = ChainConfidence(np.array([0.5]), np.zeros((1, 1)), np.zeros((1, 1)), 0.0)
    found = interface_scores(**case, pae=np.ones((5, 5)), confidence=confidence)
    assert found["pairs"] == {}
    assert found["ipsae_max"] is None
    assert found["actifptm"] is None
    assert found["chains"] == {"A": {"residues": 5, "mean_plddt": pytest.approx(62.0), "ptm": 0.5}}


def test_everything_is_plain_json_and_names_are_those_of_the_files() -> None:
    case = two_chains() | {"chain_index": np.array([0, 1, 1, 2, 2])}
    matrix = np.arange(9.0).reshape(3, 3) / 10
    confidence = ChainConfidence(np.array([0.1, 0.2, 0.3]), matrix, matrix / 2, np.float32(0.25))
    found = interface_scores(**case, pae=np.ones((5, 5), np.float32), confidence=confidence)
    assert list(found["pairs"]) == ["A-B", "A-C", "B-C"]
    assert found["pairs"]["B-C"]["iptm"] == 0.5
    assert found["pairs"]["B-C"]["actifptm"] == 0.25
    assert found["actifptm"] == 0.25
    assert found["chains"]["C"]["ptm"] == 0.3
    assert found["ipsae_max"] == max(pair["ipsae"] for pair in found["pairs"].values())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_scores_of_errors_that_are_nan_are_nan() -> None:
    """They would be those of a pair without confidence, 0."""
    pae = error([[2, 9], [9, 4], [9, 9]])
    pae[0, 3] = np.nan
    found = interface_scores(**two_chains(), pae=pae)
    pair = found["pairs"]["A-B"]
    for key in ("ipsae", "ipsae_d0chn", "ipsae_d0dom", "iptm_d0chn", "lis", "pdockq2", "interface_pae"):
        assert math.isnan(pair[key]), key
    assert math.isnan(found["ipsae_max"])
    assert pair["directions"]["B-A"]["ipsae"] == 0.0
    assert pair["pdockq"] > 0.0


def test_scores_are_those_of_the_decimals_of_files() -> None:
    case, errors = two_chains(), np.random.default_rng(0).uniform(0, 20, (5, 5))
    case["plddt"] = case["plddt"] + np.array([0.0049, 0.004, 0.003, -0.0049, 0.0049])
    written = case | {"plddt": case["plddt"].round(2), "atom_positions": case["atom_positions"].round(3)}
    assert interface_scores(**case, pae=errors) == interface_scores(**written, pae=errors.round(2))


def test_lists_are_arrays() -> None:
    case = two_chains()
    plain = {key: value.tolist() for key, value in case.items()}
    pae = np.full((5, 5), 5.0)
    assert interface_scores(**plain, pae=pae.tolist()) == interface_scores(**case, pae=pae)


def test_pairs_of_chains_that_a_dash_would_confuse_have_keys_of_their_own() -> None:
    scores = interface_scores(**two_chains(), names=["a", "a-a"], pae=np.full((5, 5), 5.0))
    ((key, pair),) = scores["pairs"].items()
    assert (key, list(pair["directions"])) == ("a a-a", ["a a-a", "a-a a"])


def test_shapes_that_disagree_are_refused() -> None:
    case = two_chains()
    for chains in ([0, 1, 1, 0, 0], [0, 1, 0, 1, 0]):
        with pytest.raises(ValueError, match="all residues of a chain in a row"):
            interface_scores(**case | {"chain_index": np.array(chains)})
    for names in (["A"], ["A", "A"], list("ABC")):
        with pytest.raises(ValueError, match="names must be 2 different ones"):
            interface_scores(**case, names=names)
    with pytest.raises(ValueError, match=r"aligned errors of two chains \[n, m\], found shape \[3\]"):
        directed_scores(np.ones(3))
    with pytest.raises(ValueError, match=r"points of a chain has shape \[1, 2\], expected \[1, 3\]"):
        interface_contacts(np.zeros((1, 3)), np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"pae has shape \[5, 5\], expected \[1, 1\]"):
        interface_contacts(np.zeros((1, 3)), np.zeros((1, 3))).pdockq2([90.0], [90.0], np.ones((5, 5)))
    with pytest.raises(ValueError, match=r"pae has shape \[4, 5\], expected \[5, 5\]"):
        interface_scores(**case, pae=np.ones((4, 5)))
    with pytest.raises(ValueError, match="confidence has 1 chains"):
        interface_scores(**case, confidence=ChainConfidence(np.ones(1), np.ones((1, 1))))
    with pytest.raises(ValueError, match=r"ChainConfidence.iptm has shape \[1, 2\]"):
        ChainConfidence(np.ones(2), np.ones((1, 2)))
    with pytest.raises(ValueError, match="needs both actifptm and pair_actifptm"):
        ChainConfidence(np.ones(2), np.ones((2, 2)), np.ones((2, 2)))
