"""Predictions are read back, shown in notebooks, listed, and become objects of other libraries."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastfold
from fastfold import Prediction, load_model, predict, predict_many
from fastfold.errors import ConfigError, InputError
from fastfold.inference.api import Predictions
from fastfold.inference.output.load import read_prediction
from fastfold.products.notebook.view import view
from tests.helpers.command_line import CommandLine
from tests.helpers.results import helix_prediction


def test_a_saved_prediction_is_read_back(tmp_path: Path) -> None:
    """Of parts of proteins, too, and with the scores of its chains."""
    one = helix_prediction("a", 12, 10, templates=({"chain": "A", "used": []},))
    one = replace(one, residue_index=np.r_[3:10, 20:25, 0:10])
    one.save(tmp_path, rank=1, plots=False)
    replace(one, seed=3).save(tmp_path, rank=2, plots=False)
    found = Prediction.load(tmp_path)
    assert (found.name, found.sequences, found.model_name, found.num_recycles) == (
        one.name,
        one.sequences,
        one.model_name,
        one.num_recycles,
    )
    assert found.residue_index.tolist() == one.residue_index.tolist()
    mask = one.atom_mask[..., None]
    assert np.allclose(found.atom_positions * mask, one.atom_positions * mask, atol=1e-3)
    assert np.allclose(np.asarray(found.pae), np.asarray(one.pae), atol=0.0051)
    written, read = one.scores(), found.scores()
    interfaces, again = written.pop("interfaces"), read.pop("interfaces")
    # Coordinates of files have three decimals, which move angles and what is near a limit.
    geometry, again_geometry = written.pop("geometry"), read.pop("geometry")
    assert again_geometry.keys() == geometry.keys()
    for key in ("phi", "psi"):
        angles, again_angles = (np.array(one[key], float) for one in (geometry, again_geometry))
        assert np.allclose(angles, again_angles, atol=0.2, equal_nan=True)
    assert read == written
    assert again["chains"]["A"]["ptm"] == interfaces["chains"]["A"]["ptm"]
    pair, read_pair = interfaces["pairs"]["A-B"], again["pairs"]["A-B"]
    for score in ("iptm", "actifptm", "ipsae", "pdockq2", "lis", "contacts", "interface_plddt"):
        assert read_pair[score] == pytest.approx(pair[score], abs=2e-3)
    assert Prediction.load(tmp_path, "a", rank=2).seed == 3
    helix_prediction("b", 8).save(tmp_path, rank=1, plots=False)
    with pytest.raises(ConfigError, match="has 2 targets; give name=, 'a' for example"):
        read_prediction(tmp_path)
    with pytest.raises(ConfigError, match="no prediction 'a' of rank 3; its targets are 'a', 'b'"):
        read_prediction(tmp_path, "a", rank=3)
    next(tmp_path.glob("b_*.cif")).unlink()
    with pytest.raises(InputError, match="has no mmCIF file"):
        read_prediction(tmp_path, "b")


def test_saving_a_loaded_prediction_loses_nothing_that_was_asked_for(tmp_path: Path) -> None:
    one = helix_prediction("a", 6)
    one = replace(
        one,
        representations={"single": np.ones((6, 2), np.float32)},
        distogram={"probabilities": np.ones((6, 6, 3), np.float16), "bin_edges": np.arange(2.0)},
        restraints={"total": 1, "satisfied": 1, "restraints": []},
        forced_templates=({"name": "1abc", "within": 5},),
        given_structure={"file": "a.pdb", "tm_score": 0.5},
    )
    one.save(tmp_path / "first", plots=False)
    found = Prediction.load(tmp_path / "first")
    for key in ("restraints", "forced_templates", "given_structure"):
        assert found.scores()[key] == one.scores()[key]
    found.save(tmp_path / "second", plots=False)
    for kind in ("representations", "distogram"):
        first, second = (
            tmp_path / folder / f"{one.name}_{one.key}_{kind}.npz" for folder in ("first", "second")
        )
        assert first.read_bytes() == second.read_bytes()
    second.write_bytes(b"PK")
    with pytest.raises(InputError, match="not an archive of arrays"):
        Prediction.load(tmp_path / "second")


def test_a_notebook_shows_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
    prediction = helix_prediction("inline", 8)
    shown = view(prediction, height=300)._repr_html_()
    assert shown.startswith('<iframe style="width: 100%; height: 300px;')
    assert "&lt;!DOCTYPE html&gt;" in shown
    assert shown.count('"') == 6
    assert repr(view(prediction)) == "InlinePage(height=900)"
    (meta,) = re.findall(r'id="meta">(.*?)</script>', view(prediction).page, re.DOTALL)
    assert [(row["target"], row["rank"]) for row in json.loads(meta)["rows"]] == [("inline", 1)]


def test_structures_become_objects_of_biopython() -> None:
    prediction = helix_prediction("t", 6, 5)
    structure = prediction.to_biopython()
    residues = list(structure.get_residues())
    assert [chain.id for chain in structure.get_chains()] == ["A", "B"]
    assert len(residues) == 11
    alpha = residues[0]["CA"]
    assert np.allclose(alpha.coord, prediction.atom_positions[0, 1], atol=1e-3)
    assert alpha.bfactor == pytest.approx(float(prediction.plddt[0]), abs=0.01)


def test_structures_become_atom_arrays() -> None:
    prediction = helix_prediction("t", 6, 5)
    pytest.importorskip("biotite")
    atoms = prediction.to_biotite()
    assert len(atoms) == int((prediction.atom_mask > 0.5).sum())
    alpha = atoms[atoms.atom_name == "CA"]
    assert np.allclose(alpha.coord, prediction.atom_positions[:, 1], atol=1e-3)
    assert np.allclose(alpha.b_factor, prediction.plddt, atol=0.01)


def test_many_predictions_are_a_table(cli: CommandLine) -> None:
    weights = cli.weights()
    found = predict_many({"a": "MKVL", "b": "GSHM"}, weights, seeds=[0, 1], num_recycles=0, device="cpu")
    assert isinstance(found, Predictions)
    rows = found.table()
    assert [(row["name"], row["rank"]) for row in rows] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert rows[0]["plddt"] == found["a"][0].mean_plddt
    assert len(re.findall("<tr>", found._repr_html_())) == 5
    assert Predictions()._repr_html_() == "<p>no predictions</p>"
    with pytest.raises(ConfigError, match="device= is for networks by path or name"):
        predict("MKVL", load_model(weights), device="cpu")
    assert fastfold.Prediction is Prediction
