"""The accuracy benchmark: structures of no skill, means by the depth of alignments, and the program itself."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.no_skill import RISE, SeparationPrior, helix_bundle, straight_helix
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.contacts import contact_probabilities, score_distogram
from fastfold.protein.metrics.lddt import lddt
from fastfold.training.validation import ChainScore, resolved_beta
from tests.conftest import REPOSITORY
from tests.helpers.sample_chains import chain_structure


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks' folder, as the program there does."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))

    def loaded(name: str) -> ModuleType:
        return importlib.import_module(name)

    return loaded


def steps(points: np.ndarray) -> np.ndarray:
    return np.linalg.norm(np.diff(points, axis=0), axis=-1)


@pytest.mark.parametrize("make", [helix_bundle, straight_helix])
def test_every_protein_of_a_length_has_the_same_structure(make: Any):
    np.testing.assert_array_equal(make(75), make(75))
    np.testing.assert_array_equal(make(75)[:40], make(40))
    assert make(75).shape == (75, 3)


def test_neighbours_in_a_helix_are_as_far_apart_as_in_proteins():
    np.testing.assert_allclose(steps(straight_helix(50)), 3.8, atol=0.05)
    within = np.arange(1, 75) % 18 != 0
    np.testing.assert_allclose(steps(helix_bundle(75))[within], 3.8, atol=0.05)


def test_all_helices_are_right_handed():
    points = helix_bundle(75).astype(float)
    for start in range(0, 72, 18):
        a, b, c = np.diff(points[start : start + 18], axis=0)[:3]
        assert np.dot(np.cross(a, b), c) > 0


def test_helices_of_the_bundle_are_antiparallel_and_three_stand_in_a_row():
    points = helix_bundle(18 * 6).reshape(6, 18, 3)
    np.testing.assert_allclose(
        points[:, -1, 2] - points[:, 0, 2], 17 * RISE * np.array([1, -1] * 3), rtol=1e-5
    )
    axes = points[:, :18, :2].mean(1)
    np.testing.assert_allclose(axes, [[10 * x, 10 * y] for y in (0, 1) for x in (0, 1, 2)], atol=0.3)


def scored(depth: int, lddt_ca: float = 0.4) -> ChainScore:
    return ChainScore(f"depth {depth}", 8, lddt_ca, 0.2, 0.5, np.full(8, lddt_ca), np.full(8, 0.5), depth)


def measured(load: Any, depth: int, lddt_ca: float = 0.4, **figures: float) -> Any:
    own = {"lddt_ca": lddt_ca, "tm_score": 0.2, "lddt_ca_bundle": 0.3}
    return load("accuracy_tables").Measured(scored(depth, lddt_ca), own | figures)


def test_chains_are_grouped_by_the_depth_of_their_alignments(load: Any):
    depths = (0, 0, 1, 49, 50, 199, 200, 900)
    groups = load("accuracy_tables").summarize([measured(load, depth) for depth in depths])
    assert {name: group["chains"] for name, group in groups.items()} == {
        "all chains": 8,
        "none": 2,
        "1 row and more": 6,
        "1 to 49": 2,
        "50 to 199": 2,
        "200 and more": 2,
        "none, up to 100 residues": 2,
        "1 row and more, up to 100 residues": 6,
    }
    assert "none" not in load("accuracy_tables").summarize([measured(load, 3)])


def test_means_are_over_chains_that_have_a_figure_and_their_number_is_given(load: Any):
    with_contacts = {"base_rate": 0.1, "precision_l5": 0.6, "precision_l5_input": 0.5}
    chains = [measured(load, 9, 0.2), measured(load, 9, 0.4, **with_contacts)]
    found = load("accuracy_tables").summary(chains)
    assert found["lddt_ca"] == pytest.approx(0.3)
    assert found["above_bundle"] == 0.5
    assert (found["precision_l5"], found["precision_l5_input"], found["contact_chains"]) == (0.6, 0.5, 1)
    assert found["plddt_bias"] == pytest.approx(0.2)


def test_the_input_is_compared_on_the_same_chains_or_not_at_all(load: Any):
    chains = [
        measured(load, 0, precision_l5=0.2, base_rate=0.1),
        measured(load, 9, precision_l5=0.6, precision_l5_input=0.5, base_rate=0.1),
    ]
    groups = load("accuracy_tables").summarize(chains)
    assert "precision_l5_input" not in groups["all chains"]
    assert groups["1 row and more"]["precision_l5_input"] == 0.5
    text = load("accuracy_tables").tables(groups)
    assert "| all chains | 2 | 0.400 |  | 0.100 |" in text
    assert "| 1 row and more | 1 | 0.600 | 0.500 | 0.100 |" in text
    assert "input alone" not in load("accuracy_tables").tables({"none": groups["none"]})


def test_scores_of_the_input_are_measured_like_the_networks(load: Any):
    """A network's contacts, given as the input's, have the network's precision."""
    chain = chain_structure(residues=28)
    chain.positions[14:, :, :] = chain.positions[13::-1]  # a hairpin: half of the chain lies on the other
    chain.mask[14:] = chain.mask[13::-1]
    beta, mask = resolved_beta(chain)
    edges = np.linspace(2.3125, 21.6875, 63)
    prior = SeparationPrior.from_structures([(beta, mask)], edges)
    score = replace(scored(9), distogram=score_distogram(prior.logits(28), edges, beta, mask))
    found = (
        load("accuracy").measure(score, chain, prior, contact_probabilities(prior.logits(28), edges)).figures
    )
    assert found["precision_l5"] == found["precision_l5_input"]
    assert found["precision_l2"] == found["precision_l2_input"]
    assert found["distogram_ce_12_24"] == found["distogram_ce_12_24_prior"]
    assert "precision_l5_input" not in load("accuracy").measure(score, chain, prior).figures


def test_hashed_chains_are_in_the_order_of_hashes_and_have_a_fitting_length(
    load: Any, data_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    program = load("accuracy")
    entries = program.open_dataset(data_folder, split="valid").entries
    lengths = [len(program.read_entry(entry).chain) for entry in entries]
    by_hash = sorted(entries, key=lambda entry: hashlib.sha256(entry.id.encode()).digest())
    assert program.hashed(entries, 0, 2) == []  # they are short
    monkeypatch.setattr(program, "HASHED_LENGTHS", range(max(lengths) + 1))
    assert program.hashed(entries, 0, 9) == by_hash
    assert program.hashed(entries, 1, 2) == by_hash[1:2]


def test_the_program_prints_tables_and_keeps_everything(
    load: Any, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "figures.json"
    load("accuracy").main(["mini", str(data_folder), "--recycles", "0", "--chains", "0", "--json", str(out)])
    text = capsys.readouterr().out
    assert "| alignment | chains | lDDT-CA | bundle | helix |" in text
    assert "| none | 2 |" in text
    found = json.loads(out.read_text())
    assert list(found["groups"]) == ["all chains", "none", "none, up to 100 residues"]
    assert "| alignment | own minus other | radius ratio |" in text
    assert [chain["id"] for chain in found["chains"]] == ["other0", "other1"]
    assert found["chains"][0].keys() >= {
        "depth",
        "lddt_ca_bundle",
        "tm_score_helix",
        "distogram_ce_6_12",
        "distogram_ce_6_12_prior",
        "radius_ratio",
        "near_neighbours",
        "clashes",
        "own_minus_other",
        "phi_positive",
        "omega_off_planar_true",
        "pierced",
    }


def test_a_collapsed_structure_is_seen(load: Any):
    chain = chain_structure(residues=28)
    mask = torch.from_numpy(chain.mask)
    true = replace(scored(0), positions=torch.from_numpy(chain.positions), atom_mask=mask)
    ball = replace(true, positions=true.positions * 0.3)
    found, collapsed = (load("accuracy").geometry(score, chain) for score in (true, ball))
    assert found["radius_ratio"] == pytest.approx(1.0)
    assert (found["radius_sane"], found["near_neighbours"]) == (1.0, found["near_neighbours_true"])
    assert collapsed["radius_ratio"] == pytest.approx(0.3)
    assert collapsed["radius_sane"] == 0.0
    assert collapsed["near_neighbours"] > found["near_neighbours"] + 1
    assert collapsed["clashes"] > found["clashes"] + 10


def test_backbones_are_compared_with_those_of_experiments(load: Any):
    chain = chain_structure(residues=28)
    mask = torch.from_numpy(chain.mask)
    score = replace(scored(0), positions=torch.from_numpy(chain.positions), atom_mask=mask)
    found = load("accuracy").backbone(score, chain)
    assert found["c_n_near"] == found["c_n_near_true"]
    stretched = replace(score, positions=torch.from_numpy(chain.positions) * 1.2)
    other = load("accuracy").backbone(stretched, chain)
    assert other["c_n_max"] == pytest.approx(1.2 * found["c_n_max"], rel=1e-5)
    assert other["c_n_max_true"] == found["c_n_max"]
    assert other["phi_positive_true"] == found["phi_positive_true"]
    assert found["pierced"] == 0.0
    assert load("accuracy").backbone(scored(0), chain) == {}


def test_the_shortest_and_longest_bonds_are_those_of_all_chains(load: Any):
    chains = [measured(load, 9, c_n_min=1.3, c_n_max=1.4), measured(load, 9, c_n_min=1.2, c_n_max=1.35)]
    found = load("accuracy_tables").summary(chains)
    assert (found["c_n_min"], found["c_n_max"]) == (1.2, 1.4)


def test_one_answer_for_every_protein_has_no_own_skill(load: Any):
    """The same structure for a short and a long chain is as good for the other's target as for its own."""
    long, short = chain_structure(residues=28), chain_structure(residues=20)
    scores = [
        replace(
            scored(0), positions=torch.from_numpy(long.positions[: len(x)]), atom_mask=torch.ones(len(x), 37)
        )
        for x in (long, short)
    ]
    ca = rc.atom_order["CA"]
    own = float(
        lddt(
            scores[1].positions[:, ca],
            torch.from_numpy(short.positions[:, ca]),
            torch.from_numpy(short.mask[:, ca]),
            per_residue=False,
        )
    )
    rows = [load("accuracy_tables").Measured(score, {"lddt_ca": own}) for score in scores]
    load("accuracy").add_own_minus_other(rows, [long, short])
    assert rows[1].figures["own_minus_other"] == pytest.approx(0.0, abs=1e-6)
    assert "own_minus_other" not in rows[0].figures
