"""Predictions: what is saved is what was predicted, and what cannot be saved leaves nothing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import gemmi
import numpy as np
import pytest
from Bio.PDB import MMCIFParser

from fastfold.errors import ConfigError, OutputError
from fastfold.inference.api import Predictions
from fastfold.inference.output.prediction import Prediction
from fastfold.inference.output.score_files import pae_json
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.protein import chain_name
from fastfold.protein.validation import check_structure
from tests.helpers.structures import assert_same_structure, protein_from_biopython, read_by_biopython


def make_prediction(*sequences: str, with_pae: bool = True, **changes: object) -> Prediction:
    rng = np.random.default_rng(1)
    sequences = sequences or ("MKTAYIAKQR", "XGW")
    aatype = rc.sequence_to_aatype("".join(sequences))
    lengths = [len(sequence) for sequence in sequences]
    n = len(aatype)
    fields: dict[str, object] = {
        "name": "T1",
        "sequences": sequences,
        "model_name": "model_1_multimer_v3",
        "seed": 7,
        "num_recycles": 3,
        "aatype": aatype,
        "residue_index": np.concatenate([np.arange(length) for length in lengths]),
        "chain_index": np.repeat(np.arange(len(lengths)), lengths),
        "atom_positions": rng.normal(scale=20, size=(n, 37, 3)),
        "atom_mask": rc.restype_atom37_mask[aatype],
        "plddt": rng.uniform(20, 98, n),
    }
    if with_pae:
        pae = rng.uniform(0, 31.75, (n, n))
        fields |= {"pae": pae, "max_pae": 31.75, "ptm": 0.61234, "iptm": 0.4}
    return Prediction(**(fields | changes))


def pairs_of(text: str) -> list[float]:
    """Aligned errors in an mmCIF file, by first and then second residue."""
    values = gemmi.cif.read_string(text).sole_block().find_values("_ma_qa_metric_local_pairwise.metric_value")
    return [float(value) for value in values]


def test_aligned_errors_of_the_mmcif_file_are_those_of_the_json_file():
    files = make_prediction("MKTAYIAKQR", "GW").files(plots=False)
    (table,) = json.loads(files["_pae.json"])
    assert pairs_of(str(files[".cif"])) == list(itertools.chain(*table["predicted_aligned_error"]))


@pytest.mark.parametrize(
    ("length", "wanted", "has_pairs"),
    [(400, None, True), (401, None, False), (401, True, True), (10, False, False), (10, None, True)],
)
def test_long_targets_have_aligned_errors_in_mmcif_on_request(
    length: int, wanted: bool | None, has_pairs: bool
):
    pae = np.full((length, length), 1.5)
    prediction = make_prediction("G" * length, with_pae=False, pae=pae, max_pae=31.75, cif_pae=wanted)
    arguments = prediction.modelcif_arguments()
    assert (arguments["pae"] is not None) == has_pairs
    if length <= 10:
        assert len(pairs_of(prediction.to_mmcif())) == has_pairs * length**2


def test_all_files_hold_what_was_predicted(tmp_path):
    prediction = make_prediction()
    paths = prediction.save(tmp_path, rank=2, settings={"precision": "fp32", "weights": ["a.npz"]})
    stem = "T1_rank_002_model_1_multimer_v3_seed_7"
    assert {kind: path.name for kind, path in paths.items()} == {
        "pdb": f"{stem}.pdb",
        "cif": f"{stem}.cif",
        "scores": f"{stem}_scores.json",
        "pae": f"{stem}_pae.json",
        "plot": f"{stem}.png",
        "config": f"{stem}_config.json",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths.values())

    assert_same_structure(read_by_biopython(paths["pdb"].read_text(), prediction.protein), prediction.protein)
    structure = MMCIFParser(QUIET=True).get_structure("x", paths["cif"])
    assert_same_structure(protein_from_biopython(structure, prediction.protein, "AB"), prediction.protein)
    scores = json.loads(paths["scores"].read_text())
    plddt = np.array(scores.pop("plddt"))
    np.testing.assert_allclose(plddt, prediction.plddt, atol=0.00501)
    geometry = scores.pop("geometry")
    assert geometry == check_structure(prediction.protein).to_dict()
    assert [len(geometry[key]) for key in ("phi", "psi", "regions")] == [len(prediction.aatype)] * 3
    interfaces = scores.pop("interfaces")
    assert interfaces["chains"]["B"]["mean_plddt"] == round(float(plddt[10:].mean()), 4)
    ipsae = prediction.interface_scores["pairs"]["A-B"]["ipsae"]
    assert interfaces["pairs"]["A-B"]["ipsae"] == interfaces["ipsae_max"] == round(ipsae, 4) > 0
    assert scores == {
        "schema_version": 1,
        "name": "T1",
        "model": "model_1_multimer_v3",
        "is_multimer": False,
        "seed": 7,
        "num_recycles": 3,
        "chain_ids": ["A", "B"],
        "sequences": ["MKTAYIAKQR", "XGW"],
        "mean_plddt": round(float(prediction.plddt.mean(dtype=float)), 2),
        "ptm": 0.6123,
        "iptm": 0.4,
        "ranking_confidence": 0.4425,
        "max_pae": 31.75,
    }
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")
    config = json.loads(paths["config"].read_text())
    assert config["settings"] == {"precision": "fp32", "weights": ["a.npz"]}


def test_residues_are_numbered_from_one_with_plddt_as_b_factor():
    protein = make_prediction().protein
    assert protein.residue_index.tolist() == [*range(1, 11), 1, 2, 3]
    present = protein.atom_mask > 0.5
    assert (protein.b_factors == make_prediction().plddt[:, None] * present).all()


def test_aligned_error_is_laid_out_as_alphafold_db_does():
    """One object in a list, rows of numbers with two decimals, and the largest value that can occur."""
    pae = np.array([[0.0, 0.494, 31.75], [9.506, 10.4, 0.2], [1.6, 2.4, 3.004]], np.float32)
    assert pae_json(pae, 31.75) == (
        b'[{"predicted_aligned_error":[[0,0.49,31.75],[9.51,10.4,0.2],[1.6,2.4,3]],'
        b'"max_predicted_aligned_error":31.75}]\n'
    )
    assert json.loads(pae_json(np.zeros((1, 1)), 31.75))[0]["predicted_aligned_error"] == [[0]]


def test_aligned_error_rows_are_the_residues_aligned_on(tmp_path):
    prediction = make_prediction()
    paths = prediction.save(tmp_path, plots=False)
    (written,) = json.loads(paths["pae"].read_text())
    np.testing.assert_array_equal(
        written["predicted_aligned_error"], np.around(prediction.pae.astype(float), 2)
    )


def test_without_aligned_error_head_there_is_no_pae_file(tmp_path):
    prediction = make_prediction("MKT", with_pae=False)
    paths = prediction.save(tmp_path)
    assert set(paths) == {"pdb", "cif", "scores", "plot"}
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths.values()}
    scores = json.loads(paths["scores"].read_text())
    assert (scores["ptm"], scores["iptm"], scores["max_pae"]) == (None, None, None)


def test_ranking_follows_alphafold():
    assert make_prediction().ranking_confidence == pytest.approx(0.8 * 0.4 + 0.2 * 0.61234)
    monomer = make_prediction("MKT", iptm=None)
    assert monomer.ranking_confidence == monomer.mean_plddt == pytest.approx(monomer.plddt.mean())


@pytest.mark.parametrize("field", ["atom_positions", "plddt", "pae", "ptm", "iptm", "max_pae"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_before_anything_is_written(tmp_path, field, value):
    prediction = make_prediction()
    if isinstance(getattr(prediction, field), np.ndarray):
        getattr(prediction, field)[10, ...] = value  # the unknown residue and its neighbour
        getattr(prediction, field)[11, ...] = value
    else:
        prediction = make_prediction(**{field: value})
    with pytest.raises(OutputError, match="finite"):
        prediction.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_plddt_of_a_residue_without_atoms_counts_too(tmp_path):
    prediction = make_prediction()
    prediction.plddt[10] = np.nan
    with pytest.raises(OutputError, match="pLDDT of T1 is not finite"):
        prediction.save(tmp_path / "out")


@pytest.mark.parametrize("value", [-0.5, 40.0])
def test_aligned_errors_outside_the_bins_are_refused(tmp_path, value):
    prediction = make_prediction()
    prediction.pae[0, 1] = value
    with pytest.raises(OutputError, match=r"outside of 0\.\.31\.75 Å"):
        prediction.save(tmp_path / "out")


def test_a_structure_too_large_for_pdb_is_saved_as_cif_and_reported(tmp_path, caplog):
    prediction = make_prediction(*["G"] * 63)
    with caplog.at_level(logging.WARNING):
        paths = prediction.save(tmp_path, plots=False)
    assert set(paths) == {"cif", "scores", "pae"}
    assert not list(tmp_path.glob("*.pdb"))
    assert "63 chains" in caplog.text
    structure = MMCIFParser(QUIET=True).get_structure("x", paths["cif"])
    names = [chain_name(i) for i in range(63)]
    assert_same_structure(protein_from_biopython(structure, prediction.protein, names), prediction.protein)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/b\\c", "n" * 5000, "a\0b", ".hidden", "$x_1$", "é#;"]
)
def test_no_name_leaves_the_folder_or_breaks_a_file(tmp_path, name):
    prediction = make_prediction("GA", name=name, model_name=name)
    paths = prediction.save(tmp_path / "out", rank=1)
    assert {path.parent for path in paths.values()} == {tmp_path / "out"}
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out"]
    assert not any(path.name.startswith(".") for path in (tmp_path / "out").iterdir())
    assert read_structure(paths["pdb"]).chains[0].sequence == "GA"
    assert len(list(MMCIFParser(QUIET=True).get_structure("x", paths["cif"]).get_residues())) == 2
    assert json.loads(paths["scores"].read_text())["name"] == name


def test_a_folder_that_cannot_be_written_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="it is a file"):
        make_prediction().save(tmp_path / "file", plots=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plddt": np.zeros(3)}, "plddt has shape"),
        ({"pae": np.zeros((13, 12))}, "pae has shape"),
        ({"max_pae": None}, "needs max_pae"),
        ({"sequences": ("MKTAYIAKQR",)}, "lengths"),
        ({"sequences": ("MKTAYIAKQ", "RXGW")}, "lengths"),
        ({"chain_index": np.arange(13) % 2}, "without a gap"),
    ],
)
def test_inconsistent_predictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_prediction(**changes)


def test_nothing_slow_is_imported_before_it_is_needed():
    script = (
        "import sys, fastfold.inference.output.prediction as p, fastfold.protein.io.modelcif_writer;"
        "print([m for m in ('torch', 'matplotlib', 'modelcif', 'ihm', 'Bio') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.slow
def test_three_thousand_residues_are_saved_in_seconds(tmp_path):
    rng = np.random.default_rng(0)
    sequence = rc.aatype_to_sequence(rng.integers(0, 20, 3000))
    prediction = make_prediction(sequence)
    start = time.perf_counter()
    paths = prediction.save(tmp_path, rank=1)
    assert time.perf_counter() - start < 10
    (written,) = json.loads(Path(paths["pae"]).read_text())
    np.testing.assert_array_equal(
        written["predicted_aligned_error"], np.around(prediction.pae.astype(float), 2)
    )


def test_a_prediction_shows_itself_in_three_lines_and_in_a_notebook():
    prediction = make_prediction()
    lines = repr(prediction).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"Prediction of {prediction.name}: ")
    assert f"pLDDT {prediction.mean_plddt:.1f}" in lines[2]
    named = dataclasses.replace(prediction, name="</pre><script>alert(1)</script>")
    shown = named._repr_html_()
    assert "<script>" not in shown
    assert "data:image/png;base64,iVBOR" in shown


def test_predictions_are_a_table_of_their_scores():
    first, second = (
        dataclasses.replace(make_prediction(), name=name, seed=seed) for name, seed in (("<a>", 1), ("b", 2))
    )
    assert Predictions()._repr_html_() == "<p>no predictions</p>"
    one = Predictions({"<a>": [first]})
    (row,) = one.table()
    assert (row["name"], row["rank"], row["seed"]) == ("<a>", 1, 1)
    shown = one._repr_html_()
    assert shown.startswith("<table><thead><tr><th>name</th><th>rank</th><th>model</th><th>seed</th>")
    assert "<tbody><tr><td>&lt;a&gt;</td><td>1</td>" in shown
    assert f"<td>{row['plddt']:.3g}</td>" in shown
    several = Predictions({"<a>": [first, second], "b": [second]})
    assert [(one["rank"], one["seed"]) for one in several.table()] == [(1, 1), (2, 2), (1, 2)]
    assert several._repr_html_().count("<tr>") == 4


@pytest.mark.parametrize("rank", [0, -1, 1.0, True, "1"])
def test_a_rank_is_a_whole_number_from_one(tmp_path: Path, rank: object):
    prediction = make_prediction()
    with pytest.raises(ConfigError, match="rank must be"):
        prediction.save(tmp_path / "out", rank=rank)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
