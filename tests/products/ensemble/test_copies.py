"""Copies of a chain are exchangeable between the samples of an ensemble."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from fastfold.products.ensemble.analysis import analyze, pairwise_scores, superposed_protein
from fastfold.products.ensemble.members import read_ensembles
from fastfold.products.ensemble.write import write_ensembles
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.metrics.chain_mapping import equal_chains
from tests.helpers.complexes import FIRST, SECOND, cut, joined, perturbed, ring, rotation
from tests.helpers.results import helix_prediction

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")

ORDERS = ([0, 1, 2, 3], [2, 0, 1, 3], [1, 2, 0, 3], [2, 1, 0, 3])
"""Chains of each sample, in the order of its file: three copies and another chain."""


def save_copies(folder: Path) -> Path:
    chains = perturbed([*ring(FIRST, 3, 9.0), *ring(SECOND, 1, 0.0, 35.0)], 0.8)
    for number, order in enumerate(ORDERS):
        protein = joined([perturbed(chains, 0.02 * number)[i] for i in order])
        plddt = np.concatenate([np.full(len(chains[i]), 60.0 + 10 * i) for i in order])
        turned = protein.atom_positions @ rotation((1, number, 2), 50.0 * number).T + number
        helix_prediction(
            "copies",
            *map(len, chains),
            sequences=protein.sequences,
            aatype=protein.aatype,
            atom_positions=turned.astype(np.float32),
            atom_mask=protein.atom_mask,
            plddt=plddt,
            sample={"method": "columns", "number": number + 1, "fraction": 0.15},
        ).save(folder, rank=number + 1, plots=False)
    return folder


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_copies(tmp_path_factory.mktemp("copies"))


def test_samples_that_differ_in_the_order_of_copies_are_equal(copies: Path) -> None:
    (ensemble,) = read_ensembles(copies)
    found = analyze(ensemble)
    assert found.tm_score.min() > 0.99
    assert found.rmsd.max() < 0.2
    assert found.fluctuation.max() < 0.2
    assert found.clusters.tolist() == [1, 1, 1, 1]
    for member, order in zip(ensemble.members, ORDERS, strict=True):
        # Chains are ordered as those of the first sample, with their own pLDDT.
        assert member.chains == ["ABCD"[order.index(i)] for i in range(4)]
        assert np.array_equal(member.plddt, np.repeat([60.0, 70.0, 80.0, 90.0], [30, 30, 30, 20]))
        moved = superposed_protein(ensemble, found, ensemble.members.index(member))
        ca = moved.atom_positions[:, rc.atom_order["CA"]]
        assert np.abs(ca - found.superposed[ensemble.members.index(member)]).max() < 1e-2


def test_pairs_are_mapped_by_themselves() -> None:
    """Two structures that fit each other in an order that does not fit the first one."""
    chains = perturbed(ring(FIRST, 3, 9.0), 0.8)
    orders = ([0, 1, 2], [2, 0, 1], [1, 0, 2])
    proteins = [joined([chains[i] for i in order]) for order in orders]
    ca = np.stack([one.atom_positions[:, 1] for one in proteins]).astype(np.float64)
    scores, distances = pairwise_scores(ca, equal_chains(proteins[0].sequences))
    assert scores == pytest.approx(np.ones((3, 3)), abs=1e-6)
    assert distances == pytest.approx(np.zeros((3, 3)), abs=1e-5)
    assert pairwise_scores(ca)[0].min() < 0.9


def test_mappings_are_written(copies: Path, tmp_path: Path) -> None:
    (ensemble,) = read_ensembles(copies)
    protein = ensemble.members[0].protein
    reference = tmp_path / "state.pdb"
    reference.write_text(to_pdb(cut(protein, np.r_[protein.chains[1], protein.chains[0], protein.chains[3]])))
    write_ensembles(copies, references=[reference], plots=False)
    numbers = json.loads((copies / "copies_ensemble.json").read_text())
    assert numbers["chains"] == [["ABCD"[order.index(i)] for i in range(4)] for order in ORDERS]
    state = numbers["states"]["state.pdb"]
    assert min(state["tm_score"]) > 0.98
    expected = [
        {"ABCD"[order.index(i)]: name for i, name in ((1, "A"), (0, "B"), (3, "C"))} for order in ORDERS
    ]
    assert state["chain_mapping"] == expected
    rows = [line.split("\t") for line in (copies / "copies_ensemble_residues.tsv").read_text().splitlines()]
    assert {(row[0], row[4]) for row in rows[1:]} == {
        ("A", "60.00"),
        ("B", "70.00"),
        ("C", "80.00"),
        ("D", "90.00"),
    }
