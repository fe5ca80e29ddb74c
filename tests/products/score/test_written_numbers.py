"""Every number of a table of scored structures, computed again from files alone, without the package."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.templates.whole.given import GivenStructure
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.compare import compare_with_given
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.writer import write_result
from fastfold.products.score.run import structure_targets, write_table
from tests.helpers.results import helix_prediction
from tests.helpers.written_numbers import ca_of, check_cells, motion_of, read_rows, read_values, superposed

LENGTHS = (30, 20)


def test_a_table_of_scored_structures_has_the_numbers_of_their_files(tmp_path: Path) -> None:
    """Two structures, each with two predictions whose chains have moved."""
    draws, n = np.random.default_rng(5), sum(LENGTHS)
    paths = []
    for name in ("far", "near"):
        one = helix_prediction(name, *LENGTHS)
        paths.append(tmp_path / f"{name}.cif")
        paths[-1].write_text(one.to_mmcif())
    targets, errors = structure_targets(paths, "initial_guess")
    assert not errors
    folder, ids = ResultsFolder(tmp_path / "out"), {}
    for target, noise in zip(targets, (3.0, 0.3), strict=True):
        ids[target.name] = list[str]()
        for seed in (0, 4):
            one = helix_prediction(target.name, *LENGTHS, seed=0)
            prediction = replace(
                one,
                seed=seed,
                atom_positions=one.atom_positions
                + draws.normal(0, noise, one.atom_positions.shape).astype(np.float32),
                plddt=draws.uniform(30, 95, n),
                pae=draws.uniform(0.2, 31, (n, n)),
                ptm=float(draws.uniform(0.3, 0.9)),
                iptm=float(draws.uniform(0.3, 0.9)),
            )
            source = GivenStructure(Path(target.source), "initial_guess")
            prediction = replace(prediction, given_structure=compare_with_given(prediction, source))
            about = {"input_hash": hashlib.sha256(f"{target.name} {seed}".encode()).hexdigest()}
            files = prediction.files(plots=False)
            results = folder.target(target)
            ids[target.name].append(
                write_result(results, about, prediction, {}, InferConfig(), files=files).id
            )
    path = write_table(targets, ids, tmp_path / "out")
    rows = {row["name"]: row for row in read_rows(path)}
    assert list(rows) == ["near", "far"]
    d0 = 1.24 * (n - 15) ** (1 / 3) - 1.8
    first = np.arange(n) < LENGTHS[0]
    for name, row in rows.items():
        true, each = ca_of(tmp_path / f"{name}.cif"), []
        for file in sorted((tmp_path / "out").glob(f"{name}_rank_*_scores.json")):
            scores, stem = read_values(file), str(file).removesuffix("_scores.json")
            (errors,) = read_values(Path(f"{stem}_pae.json"))
            pae = np.array(errors["predicted_aligned_error"])
            ca, plddt = ca_of(Path(f"{stem}.cif")), np.array(scores["plddt"])
            apart = np.linalg.norm(superposed(ca, true) - true, axis=-1)
            own = np.linalg.norm(superposed(ca[first], true[first]) - true[first], axis=-1)
            rotation, shift = motion_of(ca[~first], true[~first])
            moved = np.linalg.norm(ca[first] @ rotation + shift - true[first], axis=-1)
            compared = scores["given_structure"]
            assert np.mean(1 / (1 + (apart / d0) ** 2)) - 1e-3 <= compared["tm_score"] <= 1
            assert compared["tm_score"] == pytest.approx(np.mean(1 / (1 + (apart / d0) ** 2)), abs=0.05)
            each.append(
                {
                    "plddt": plddt.mean(),
                    "ptm": scores["ptm"],
                    "iptm": scores["iptm"],
                    "tm_score": compared["tm_score"],
                    "composite": plddt.mean() / 100 * scores["ptm"] * compared["tm_score"],
                    "rmsd": np.sqrt(np.square(apart).mean()),
                    "binder_plddt": plddt[first].mean(),
                    "interaction_pae": (pae[first][:, ~first].mean() + pae[~first][:, first].mean()) / 2,
                    "binder_rmsd": np.sqrt(np.square(own).mean()),
                    "binder_rmsd_on_target": np.sqrt(np.square(moved).mean()),
                    "ipsae_max": scores["interfaces"]["pairs"]["A-B"]["ipsae"],
                }
            )
            geometry = compared["geometry"]
        assert len(each) == 2
        means = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
        exact = {key: means.pop(key) for key in ("ptm", "iptm", "tm_score", "ipsae_max")}
        check_cells(row, exact, places=4)
        check_cells(row, means, places=2)  # of numbers that files round
        check_cells(row, {"residues": 50.0, "chains": 2.0, "predictions": 2.0}, places=4)
        assert row["file"] == str(tmp_path / f"{name}.cif")
        assert row["geometry"] == ("; ".join(geometry["problems"]) or "ok")
        left = set(row) - {*means, *exact, "name", "file", "residues", "chains", "predictions", "geometry"}
        check_cells(row, {key: geometry[key] for key in left}, places=4)
