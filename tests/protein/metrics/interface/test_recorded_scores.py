"""Interface scores equal those of the published programs: IPSAE version 4, and ColabFold's as far as it rounds."""

from __future__ import annotations

import gzip
import itertools
import json

import numpy as np
import pytest

from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.interface import directed_scores, interface_contacts, interface_scores
from fastfold.protein.metrics.interface.pair_scores import contact_points
from tests.conftest import require_shared
from tests.helpers.interface_oracles import CASES, InterfaceCase

SCORES = {
    "ipsae": "ipsae_d0res",
    "ipsae_d0chn": "ipsae_d0chn",
    "ipsae_d0dom": "ipsae_d0dom",
    "iptm_d0chn": "iptm_d0chn",
}
BY_RESIDUE = (
    "ipsae_d0res_by_residue",
    "ipsae_d0chn_by_residue",
    "ipsae_d0dom_by_residue",
    "iptm_d0chn_by_residue",
    "n0res_by_residue",
    "d0res_by_residue",
)


def scores_of(case: InterfaceCase, pae_cutoff: float, distance_cutoff: float, plddt: np.ndarray) -> dict:
    return interface_scores(
        case.chain_index,
        case.inputs["atom_positions"],
        case.inputs["atom_mask"],
        plddt,
        pae=case.pae,
        pae_cutoff=pae_cutoff,
        distance_cutoff=distance_cutoff,
    )


@pytest.mark.parametrize(
    ("name", "setting"),
    [*itertools.product(CASES, ("15_15", "10_10", "08_06")), ("dimer_contact", "15_15_afdb_style")],
)
def test_every_value_of_the_ipsae_program(name: str, setting: str) -> None:
    """Both directions of every pair to 1e-9, and the program's ``max`` rows where its order of chains is alphabetic."""
    case = InterfaceCase(name)
    recorded = case.expected["ipsae_v4"][setting]
    # A file without pLDDT counts as one of zeros.
    plddt = np.zeros_like(case.plddt) if setting.endswith("afdb_style") else case.plddt
    pae_cutoff, distance_cutoff = map(float, setting.split("_")[:2])
    found = scores_of(case, pae_cutoff, distance_cutoff, plddt)
    assert len(found["pairs"]) == len(recorded["pairs"]) // 2
    ours = [chr(ord("A") + number) for number in range(len(case.letters))]
    theirs = dict(zip(ours, case.letters, strict=True))
    near = {"rel": 0, "abs": 1e-9}
    for pair, scores in found["pairs"].items():
        for direction, one in scores["directions"].items():
            expected = recorded["pairs"]["-".join(theirs[chain] for chain in direction.split("-"))]
            for key, name_there in SCORES.items():
                assert one[key] == pytest.approx(expected[f"{name_there}_asym"], **near), (direction, key)
            assert one["lis"] == pytest.approx(expected["LIS"], **near)
            assert one["pdockq2"] == pytest.approx(expected["pDockQ2"], **near)
            assert scores["pdockq"] == pytest.approx(expected["pDockQ"], **near)
            for key in ("d0res", "d0chn", "d0dom"):
                assert one[key] == pytest.approx(expected[key], **near), (direction, key)
            for key in ("n0res", "n0chn", "n0dom"):
                assert one[key] == expected[key], (direction, key)
            assert one["pairs"] == expected["valid_pair_counts"]
            assert one["residues"] == [expected["nres1"], expected["nres2"]]
            assert one["near_pairs"] == expected["dist_valid_pair_counts"]
            assert one["near_residues"] == [expected["dist1"], expected["dist2"]]
            assert sum(scores["interface_residues"]) == expected["pDockQ_interface_residues"]
        if case.letters == sorted(case.letters):
            expected = recorded["pairs"][pair]
            for key, name_there in SCORES.items():
                assert scores[key] == pytest.approx(expected[f"{name_there}_max"], **near)
        both = [recorded["pairs"]["-".join(theirs[x] for x in d.split("-"))] for d in scores["directions"]]
        assert scores["ipsae"] == pytest.approx(max(one["ipsae_d0res_asym"] for one in both), **near)
        assert scores["lis"] == pytest.approx(sum(one["LIS"] for one in both) / 2, **near)
        assert scores["pdockq2"] == pytest.approx(max(one["pDockQ2"] for one in both), **near)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("synthetic_")])
def test_every_residue_of_the_ipsae_program(name: str) -> None:
    case = InterfaceCase(name)
    for setting, cutoff in (("15_15", 15.0), ("10_10", 10.0), ("08_06", 8.0)):
        for (i, first), (j, second) in itertools.permutations(enumerate(case.letters), 2):
            rows, columns = case.chains[i], case.chains[j]
            scores = directed_scores(case.pae[rows, columns], cutoff=cutoff)
            for field in BY_RESIDUE:
                key = f"ipsae_{setting}/{first}-{second}/{field.removesuffix('_by_residue')}_byres"
                recorded = case.arrays[key]
                np.testing.assert_allclose(getattr(scores, field), recorded[rows], rtol=0, atol=1e-9)
                if field.startswith("i"):
                    assert not np.delete(recorded, np.r_[rows]).any()


@pytest.mark.parametrize("name", CASES)
def test_colabfolds_interface_scores(name: str) -> None:
    """To the decimals that it prints; its letters are A, B, ... in order."""
    case = InterfaceCase(name)
    recorded = case.expected["colabfold_interface_scores"]["from_files"]
    found = scores_of(case, 15.0, 15.0, case.plddt)["pairs"]
    directions = {name: one for pair in found.values() for name, one in pair["directions"].items()}
    assert {d: round(one["ipsae"], 6) for d, one in directions.items()} == pytest.approx(
        recorded["ipsae"], abs=2e-6
    )
    assert {d: one["pdockq2"] for d, one in directions.items()} == pytest.approx(
        recorded["pdockq2"], abs=6e-5
    )
    assert {d: one["pdockq"] for d, one in found.items()} == pytest.approx(recorded["pdockq"], abs=6e-5)


def test_published_pdockq_of_a_structure_of_the_program_itself(tmp_path) -> None:
    """Three chains of 1,964 residues, from the PDB file with pLDDT in the B-factor column."""
    folder = require_shared("oracles_data", "interface_scores", "repo_example_pdockq")
    path = tmp_path / "model.pdb"
    path.write_bytes(gzip.decompress((folder / "model.pdb.gz").read_bytes()))
    chains = {chain.chain_id: chain for chain in read_structure(path).chains}
    expected = json.loads((folder / "expected.json").read_text())
    points = {letter: contact_points(chain.positions, chain.mask) for letter, chain in chains.items()}
    plddt = {letter: chain.b_factors[:, 1].astype(np.float64).round(2) for letter, chain in chains.items()}
    assert sum(len(chain) for chain in chains.values()) == 1964
    for first, second in itertools.permutations(chains, 2):
        contacts = interface_contacts(points[first], points[second])
        recorded = expected[f"{first}-{second}"]
        assert contacts.pdockq(plddt[first], plddt[second]) == pytest.approx(recorded["pDockQ"], abs=1e-9)
        residues = len(np.unique(contacts.first)) + len(np.unique(contacts.second))
        assert residues == recorded["interface_residues"]
