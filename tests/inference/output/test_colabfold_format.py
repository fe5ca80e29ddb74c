"""``--output-format colabfold``: names and scores files as ColabFold writes them, through all that a folder does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError, WriteError
from fastfold.inference.output.file_names import fastfold_name, file_name, prediction_key
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.summary import read_table
from fastfold.inference.report.discover import find_predictions
from tests.helpers.command_line import CommandLine
from tests.helpers.results import helix_prediction

DIMER = "MKTAYIAKQR:GSHMAWLPE"
FORMAT = ("--output-format", "colabfold")


@pytest.mark.parametrize(
    ("network", "key"),
    [
        ("model_3_multimer_v3", "alphafold2_multimer_v3_model_3_seed_002"),
        ("model_1_ptm", "alphafold2_ptm_model_1_seed_002"),
        ("model_5", "alphafold2_model_5_seed_002"),
        ("mini", "alphafold2_mini_seed_002"),
        ("my_model_1_tuned", "alphafold2_my_model_1_tuned_seed_002"),
    ],
)
def test_networks_are_named_like_colabfold_names_them(network: str, key: str) -> None:
    assert prediction_key(network, 2, "colabfold") == key


def test_names_are_colabfolds_and_lead_back_to_our_own() -> None:
    key = prediction_key("model_1_multimer_v3", 0, "colabfold")
    expected = {
        ".pdb": f"a_b_unrelaxed_rank_001_{key}.pdb",
        "_relaxed.pdb": f"a_b_relaxed_rank_001_{key}.pdb",
        "_colabfold.json": f"a_b_scores_rank_001_{key}.json",
        "_r3.pdb": f"a_b_unrelaxed_rank_001_{key}.r3.pdb",
        "_scores.json": f"a_b_fastfold_rank_001_{key}.json",
        "_pae.json": f"a_b_pae_rank_001_{key}.json",
        "_config.json": f"a_b_config_rank_001_{key}.json",
        "_coverage.png": f"a_b_coverage_rank_001_{key}.png",
        ".cif": f"a_b_unrelaxed_rank_001_{key}.cif",
    }
    for ending, name in expected.items():
        assert file_name("a_b", 1, key, ending, "colabfold") == name
        assert fastfold_name(name) == f"a_b_rank_001_{key}{ending}"
    assert file_name("a", None, key, ".pdb", "colabfold") == f"a_unrelaxed_{key}.pdb"
    for name in (
        "my_relaxed_rank_001_model_1_seed_0.pdb",
        "summary.tsv",
        "a_rank_001_model_1_seed_0_scores.json",
    ):
        assert fastfold_name(name) == name


def test_the_scores_file_holds_what_colabfold_writes(tmp_path: Path) -> None:
    prediction = helix_prediction("pair", 12, 9)
    paths = prediction.save(tmp_path, rank=1, plots=False, output_format="colabfold")
    assert paths["colabfold"].name == "pair_scores_rank_001_alphafold2_multimer_v3_model_1_seed_000.json"
    found = json.loads(paths["colabfold"].read_text())
    assert list(found) == ["plddt", "max_pae", "pae", "ptm", "iptm"]
    np.testing.assert_array_equal(found["pae"], np.around(prediction.pae.astype(float), 2))
    np.testing.assert_array_equal(found["plddt"], np.around(prediction.plddt.astype(float), 2))
    assert found["max_pae"] == np.max(found["pae"])
    assert (found["ptm"], found["iptm"]) == (0.71, 0.62)
    alone = helix_prediction("one", 9, pae=None, max_pae=None, ptm=None, iptm=None, chain_confidence=None)
    paths = alone.save(tmp_path, plots=False, output_format="colabfold")
    assert list(json.loads(paths["colabfold"].read_text())) == ["plddt"]
    with pytest.raises(ConfigError, match="output_format must be one of fastfold, colabfold"):
        prediction.save(tmp_path / "no", output_format="alphafold")  # type: ignore[arg-type]


def test_a_run_writes_ranks_and_finds_files_of_that_format(cli: CommandLine) -> None:
    weights = [cli.weights("model_1_multimer_v3"), cli.weights("model_2_multimer_v3", noise=0.3)]
    fasta = cli.fasta({"pair": DIMER})
    assert cli.infer(fasta, *FORMAT, weights=weights[:1]).code == 0
    done = cli.infer(fasta, *FORMAT, weights=weights)
    assert done.out.startswith("1 folded;")
    stems = [path.name.removesuffix(".pdb") for path in sorted(cli.out.glob("pair_unrelaxed_rank_*.pdb"))]
    assert [stem[:23] for stem in stems] == ["pair_unrelaxed_rank_001", "pair_unrelaxed_rank_002"]
    for stem in stems:
        scores = cli.load(stem.replace("unrelaxed", "scores") + ".json")
        assert np.shape(scores["pae"]) == (19, 19)
        own = cli.load(stem.replace("unrelaxed", "fastfold") + ".json")
        assert own["iptm"] == scores["iptm"]
        assert own["model"].replace("_multimer_v3", "") in stem
    assert [line["files"] for line in read_table(cli.out / "summary.tsv")] == stems
    assert "1 finished before" in cli.infer(fasta, *FORMAT, weights=weights).out
    found = find_predictions(cli.out)
    assert [(one.target, one.rank, one.scores["name"]) for one in found] == [
        ("pair", 1, "pair"),
        ("pair", 2, "pair"),
    ]
    assert {"_pae.json", "_config.json", ".pdb"} <= set(found[0].files)
    assert all(one.listed["seconds"] >= 0 for one in found)

    reference = cli.folder / "reference.pdb"
    reference.write_bytes((cli.out / f"{stems[0]}.pdb").read_bytes())
    assert cli.infer(fasta, *FORMAT, "--reference", reference, weights=weights).code == 0
    compared = cli.load("pair_reference.json")
    assert compared[stems[0]]["tm_score"] == 1.0


def test_a_folder_per_target_has_alphafolds_files(cli: CommandLine) -> None:
    weights = [cli.weights("model_1_multimer_v3"), cli.weights("model_2_multimer_v3", noise=0.3)]
    fasta = cli.fasta({"pair": DIMER})
    for used in (weights[1:], weights):  # ranks may change by the second run
        assert cli.infer(fasta, *FORMAT, weights=used).code == 0
    debug = cli.load("pair/ranking_debug.json")
    best = debug["order"][0]
    assert sorted(debug["order"]) == ["model_1_multimer_v3_pred_0", "model_2_multimer_v3_pred_0"]
    assert sorted(path.name for path in (cli.out / "pair").iterdir()) == [
        f"pae_{best}.json",
        "ranked_0.pdb",
        "ranked_1.pdb",
        "ranking_debug.json",
    ]
    for rank in (0, 1):
        (structure,) = cli.out.glob(f"pair_unrelaxed_rank_{rank + 1:03d}_*.pdb")
        assert (cli.out / "pair" / f"ranked_{rank}.pdb").read_bytes() == structure.read_bytes()
    (scores,) = cli.out.glob("pair_fastfold_rank_001_*.json")
    own = json.loads(scores.read_text())
    assert debug["iptm"][best] == pytest.approx(own["iptm"], abs=1e-4)
    assert debug["iptm+ptm"][best] == pytest.approx(0.8 * own["iptm"] + 0.2 * own["ptm"], abs=1e-4)
    (pae,) = cli.load(f"pair/pae_{best}.json")
    (theirs,) = cli.out.glob("pair_scores_rank_001_*.json")
    assert pae["predicted_aligned_error"] == json.loads(theirs.read_text())["pae"]
    assert cli.infer(fasta, *FORMAT, "--overwrite", weights=weights[:1]).code == 0
    assert not (cli.out / "pair" / "ranked_1.pdb").exists()


def test_a_folder_of_someone_else_is_left_alone(cli: CommandLine) -> None:
    (cli.out / "pair").mkdir(parents=True)
    (cli.out / "pair" / "ranked_0.pdb").write_text("AlphaFold's own")
    done = cli.infer(cli.fasta({"pair": DIMER}), *FORMAT, weights=[cli.weights("model_1_multimer_v3")])
    assert done.code == 1
    assert "pair was not made by FastFold; remove it" in done.err
    assert (cli.out / "pair" / "ranked_0.pdb").read_text() == "AlphaFold's own"
    assert list(cli.out.glob("pair_scores_rank_001_*.json"))


def test_ranks_change_by_renaming_and_lost_ranks_are_found_again(tmp_path: Path) -> None:
    """A process may be killed between renaming a file and writing its rank down."""
    results = ResultsFolder(tmp_path, output_format="colabfold").target(
        target_from_sequence("MKTAYIAKQR", "t")
    )

    def by_plddt(scores: Sequence[Mapping[str, Any]]) -> list[float]:
        return [one["plddt"] for one in scores]

    for number, plddt in ((0, 50.0), (1, 60.0)):
        files = {end: f"{number}{end}" for end in (".pdb", "_scores.json", "_colabfold.json", "_r0.pdb")}
        key = prediction_key("model_1_ptm", number, "colabfold")
        results.add(f"{number:064x}", key, files, {"plddt": plddt}, by_plddt)
    names = {path.name: path.read_text() for path in tmp_path.glob("t_*")}
    assert names["t_unrelaxed_rank_001_alphafold2_ptm_model_1_seed_001.pdb"] == "1.pdb"
    assert names["t_scores_rank_002_alphafold2_ptm_model_1_seed_000.json"] == "0_colabfold.json"
    assert len(names) == 8
    for path in tmp_path.glob("t_*_rank_001_*"):
        path.rename(path.with_name(path.name.replace("_rank_001_", "_rank_007_")))
    results.rank(lambda scores: [-number for number in by_plddt(scores)])
    assert {path.name: path.read_text() for path in tmp_path.glob("t_*")} == {
        name.replace("_rank_001_", "_rank_002_")
        if "_rank_001_" in name
        else name.replace("_rank_002_", "_rank_001_"): text
        for name, text in names.items()
    }
    assert all(results.find(record.id) for record in results.records())
    foreign = tmp_path / "t_relaxed_rank_001_alphafold2_ptm_model_1_seed_005.pdb"
    foreign.write_text("of ColabFold")
    key = prediction_key("model_1_ptm", 5, "colabfold")
    found = results.add(f"{5:064x}", key, {".pdb": "new"}, {"plddt": 99.0}, by_plddt)
    assert found.key == f"{key}_00000000"
    assert foreign.read_text() == "of ColabFold"


def test_a_relaxed_structure_is_shown_under_either_name(tmp_path: Path) -> None:
    for output_format in ("fastfold", "colabfold"):
        folder = tmp_path / output_format
        prediction = helix_prediction("pair", 12, 9)
        paths = prediction.save(folder, rank=1, plots=False, output_format=output_format)
        (found,) = find_predictions(folder)
        assert not found.has_relaxed_structure
        key = prediction_key(prediction.model_name, 0, output_format)
        relaxed = folder / file_name("pair", 1, key, "_relaxed.pdb", output_format)
        relaxed.write_bytes(paths["pdb"].read_bytes())
        (found,) = find_predictions(folder)
        assert found.has_relaxed_structure
        assert found.structure == relaxed


def test_a_folder_keeps_its_format(tmp_path: Path) -> None:
    ResultsFolder(tmp_path, output_format="colabfold")
    assert ResultsFolder(tmp_path).output_format == "colabfold"
    assert ResultsFolder(tmp_path, output_format="fastfold").output_format == "fastfold"
    (tmp_path / ".fastfold" / "t").mkdir()
    (tmp_path / ".fastfold" / "t" / "target.json").write_text("{}")
    with pytest.raises(
        WriteError, match="in the format fastfold; give another out=, or output_format='fastfold'"
    ):
        ResultsFolder(tmp_path, output_format="colabfold")
    assert ResultsFolder(tmp_path).output_format == "fastfold"
