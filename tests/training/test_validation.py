"""Validation: what is measured of a fold, and which chains a mean is taken over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa
from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.protein.metrics.contacts import ContactPrecision, DistogramScore
from fastfold.training.validation import ChainScore, mean_figures, resolved_beta, score_chain
from tests.helpers.networks import oracle_config, random_model
from tests.helpers.sample_chains import chain_structure

TREE = oracle_config()
CHAIN = chain_structure(residues=14)


def alignment(*rows: str) -> Msa:
    return Msa(rows, np.zeros((len(rows), len(CHAIN)), np.int32), ("",) * len(rows))


def score(depth: int | None, lddt_ca: float, cross_entropy: float, l5: float | None) -> ChainScore:
    contacts = None if l5 is None else ContactPrecision(l5, l5 / 2, 0.01)
    distogram = DistogramScore({"6_12": cross_entropy}, contacts, None)
    return ChainScore("x", 9, lddt_ca, 0.5, 0.5, np.ones(9), np.ones(9), depth, distogram)


def test_a_chain_is_scored_by_its_distogram_too():
    """One that says nothing costs the entropy of its bins."""
    model = random_model(TREE)
    for parameter in model.heads["distogram"].parameters():
        parameter.data.zero_()
    row = CHAIN.sequence
    other = "-" + row[1:]
    found = score_chain(
        model, "x", CHAIN, (alignment(row, other, other), alignment(row, "--" + row[2:])), TREE, 0
    )
    assert found.depth == 2  # the query is not a row, and equal rows are one
    assert found.distogram is not None
    assert list(found.distogram.cross_entropy) == ["3_6", "6_12", "12_24"]
    bins = TREE.model.heads.distogram.num_bins
    assert list(found.distogram.cross_entropy.values()) == pytest.approx([np.log(bins)] * 3)
    assert found.distogram.contacts is None
    assert list(found.figures()) == [
        "lddt_ca",
        "tm_score",
        "plddt",
        "distogram_ce_3_6",
        "distogram_ce_6_12",
        "distogram_ce_12_24",
    ]
    assert score_chain(model, "x", CHAIN, (), TREE, 0).depth == 0


def test_a_fold_that_is_not_finite_scores_nothing():
    """A run goes on, as after a training step that is not finite."""
    model = random_model(TREE)
    assert score_chain(model, "x", CHAIN, (), TREE, 0).tm_score > 0
    model.structure_module.backbone_update.bias.data[-1] = float("nan")
    found = score_chain(model, "x", CHAIN, (), TREE, 0)
    assert (found.tm_score, found.lddt_ca) == pytest.approx((0.0, 0.0))


def test_logits_may_be_computed_when_they_are_asked_for():
    model = random_model(TREE)
    before = score_chain(model, "x", CHAIN, (), TREE, 0).distogram
    for module in model.modules():
        if hasattr(module, "policy"):
            module.policy = ExecutionPolicy(lazy_logits=True)
    after = score_chain(model, "x", CHAIN, (), TREE, 0).distogram
    assert before is not None
    assert after is not None
    assert after.cross_entropy == pytest.approx(before.cross_entropy)


def test_distances_are_between_cb_atoms_of_resolved_residues():
    beta, mask = resolved_beta(replace(CHAIN, sequence="G" + CHAIN.sequence[1:]))
    np.testing.assert_array_equal(beta[0], CHAIN.positions[0, 1])
    np.testing.assert_array_equal(
        beta[1:], np.where(CHAIN.mask[1:, 3:4] > 0, CHAIN.positions[1:, 3], beta[1:])
    )
    np.testing.assert_array_equal(mask[1:3], CHAIN.mask[1:3, 3])
    assert mask[3] == 0.0  # the residue is not resolved


def test_means_are_over_the_chains_that_have_a_figure_and_by_depth():
    scores = [
        score(0, 0.2, 3.0, 0.1),
        score(199, 0.3, 2.0, None),
        score(200, 0.7, 1.0, 0.6),
    ]
    means = mean_figures(scores)
    assert means["valid_lddt_ca"] == pytest.approx(0.4)
    assert means["valid_distogram_ce_6_12"] == pytest.approx(2.0)
    assert means["valid_distogram_ce_6_12_msa"] == pytest.approx(1.5)
    assert means["valid_distogram_ce_6_12_deep"] == pytest.approx(1.0)
    assert means["valid_distogram_ce_6_12_single"] == pytest.approx(3.0)
    assert means["valid_precision_l5"] == pytest.approx(0.35)
    assert means["valid_precision_l5_msa"] == pytest.approx(0.6)
    assert means["valid_precision_l2_deep"] == pytest.approx(0.3)
    alone = mean_figures(scores[:1])
    assert "valid_lddt_ca_single" in alone
    assert not [name for name in alone if name.endswith(("_msa", "_deep"))]
    assert np.isnan(mean_figures([score(0, float("nan"), 1.0, None), *scores])["valid_lddt_ca"])


def test_complexes_have_no_depth_and_no_distogram_scores():
    whole = replace(score(None, 0.5, 1.0, 0.5), distogram=None)
    assert list(mean_figures([whole])) == ["valid_lddt_ca", "valid_tm_score", "valid_plddt"]


def test_a_network_without_a_distogram_is_scored_by_its_structure():
    model = random_model(TREE)
    for module in model.modules():
        if hasattr(module, "policy"):
            module.policy = ExecutionPolicy(heads=("predicted_lddt",))
    found = score_chain(model, "x", CHAIN, (), TREE, 0)
    assert found.distogram is None
    assert found.depth == 0
