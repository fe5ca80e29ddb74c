"""Scores against the given structure, compared with dl_binder_design and with AF2Rank's formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.templates.whole.given import GivenStructure
from fastfold.inference.folding.compare import compare_with_given
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import to_pdb
from tests.helpers.results import helix_prediction

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def test_scores_of_a_complex(tmp_path: Path) -> None:
    """RMSD of the binder on itself and on its target, PAE between both, and the composite score."""
    found = helix_prediction("x", PUBLISHED["binder"], 5)
    positions = {}
    for key in ("initial", "predicted"):
        positions[key] = found.atom_positions.copy()
        positions[key][:, 1] = PUBLISHED[key]
    path = tmp_path / "x.pdb"
    initial = replace(found, atom_positions=positions["initial"])
    path.write_text(to_pdb(initial.protein))
    prediction = replace(found, atom_positions=positions["predicted"], ptm=0.5)
    scores = compare_with_given(prediction, GivenStructure(path, "template"))
    assert scores["binder_rmsd"] == pytest.approx(PUBLISHED["binder_aligned_rmsd"], abs=2e-4)
    assert scores["binder_rmsd_on_target"] == pytest.approx(PUBLISHED["target_aligned_rmsd"], abs=2e-4)
    assert prediction.pae is not None
    across = (prediction.pae[:4, 4:].mean() + prediction.pae[4:, :4].mean()) / 2
    assert scores["interaction_pae"] == pytest.approx(across, rel=1e-6)
    assert scores["binder_plddt"] == pytest.approx(float(np.mean(prediction.plddt[:4])), rel=1e-6)
    expected = prediction.mean_plddt / 100 * 0.5 * scores["tm_score"]
    assert scores["composite"] == pytest.approx(expected, rel=1e-9)
    same = compare_with_given(replace(initial, ptm=None), GivenStructure(path, "template"))
    assert same["tm_score"] == pytest.approx(1.0, abs=1e-5)
    assert same["composite"] is None


def test_copies_of_a_chain_are_exchangeable(tmp_path: Path) -> None:
    """The network places the copies the other way round; the binder is the copy at the first given chain."""
    aatype = np.tile(np.arange(12), 3)
    aatype[24:] = 3
    sequences = ("".join(rc.restypes[kind] for kind in part) for part in np.split(aatype, 3))
    given = helix_prediction("x", 12, 12, 12, aatype=aatype, sequences=tuple(sequences))
    path = tmp_path / "x.pdb"
    path.write_text(to_pdb(given.protein))
    order = np.r_[12:24, 0:12, 24:36]
    swapped = replace(given, atom_positions=given.atom_positions[order])
    scores = compare_with_given(swapped, GivenStructure(path, "template"))
    assert scores["tm_score"] == pytest.approx(1.0, abs=1e-5)
    assert scores["rmsd"] == pytest.approx(0.0, abs=1e-3)
    assert (scores["binder_rmsd"], scores["binder_rmsd_on_target"]) == pytest.approx((0.0, 0.0), abs=1e-3)
    assert scores["chain_mapping"] == {"B": "A", "A": "B", "C": "C"}
    assert scores["binder_plddt"] == pytest.approx(float(given.plddt[12:24].mean()), rel=1e-6)
    assert given.pae is not None
    is_binder = np.arange(36) // 12 == 1
    across = (given.pae[is_binder][:, ~is_binder].mean() + given.pae[~is_binder][:, is_binder].mean()) / 2
    assert scores["interaction_pae"] == pytest.approx(across, rel=1e-6)
    same = compare_with_given(given, GivenStructure(path, "template"))
    assert same["chain_mapping"] == {"A": "A", "B": "B", "C": "C"}


def test_copies_that_lack_other_residues_are_exchangeable(tmp_path: Path) -> None:
    """A homotrimer whose first copy lacks a loop, placed by the network in another order."""
    whole = helix_prediction(
        "x", 12, 12, 12, aatype=np.tile(np.arange(12), 3), sequences=("ARNDCQEGHILK",) * 3
    )
    lines = to_pdb(whole.protein).splitlines(keepends=True)
    path = tmp_path / "x.pdb"
    path.write_text(
        "".join(line for line in lines if not (line[21:22] == "A" and line[22:26] in ("   5", "   6")))
    )
    kept = np.delete(np.arange(36), [4, 5])
    gapped = {
        name: getattr(whole, name)[kept]
        for name in ("aatype", "residue_index", "chain_index", "atom_mask", "plddt")
    }
    order = np.delete(np.r_[24:36, 0:12, 12:24], [4, 5])
    prediction = replace(
        whole,
        **gapped,
        sequences=("ARNDEGHILK", *whole.sequences[1:]),
        pae=whole.pae[np.ix_(kept, kept)],
        atom_positions=whole.atom_positions[order],
    )
    scores = compare_with_given(prediction, GivenStructure(path, "template"))
    assert scores["chain_mapping"] == {"B": "A", "C": "B", "A": "C"}
    assert scores["rmsd"] == pytest.approx(0.0, abs=1e-3)
    assert scores["tm_score"] == pytest.approx(
        32 / 34, abs=1e-4
    )  # two residues of the third copy are not predicted
    assert (scores["binder_rmsd"], scores["binder_rmsd_on_target"]) == pytest.approx((0.0, 0.0), abs=1e-3)
    assert scores["binder_plddt"] == pytest.approx(float(whole.plddt[12:24].mean()), rel=1e-6)
