"""``fastfold infer``: what it writes, and what decides the numbers."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from Bio.PDB import MMCIFParser, PDBParser
from Bio.PDB.MMCIF2Dict import MMCIF2Dict

import fastfold
from fastfold.inference.folding.background import Background
from fastfold.inference.output.results_folder import STATE
from fastfold.inference.output.summary import read_table
from tests.helpers.command_line import QUICK, CommandLine
from tests.inference.runner.inputs import SEQUENCE, a3m


def mean_b_factors(structure) -> list[float]:
    residues = list(structure.get_residues())
    for residue in residues:
        assert len({atom.bfactor for atom in residue}) == 1
    return [next(iter(residue)).bfactor for residue in residues]


def test_a_prediction_gets_structure_scores_aligned_error_picture_and_settings(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fastfold.utils.device.process_memory", lambda key: 300 * 2**20)
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), settings=["--num-recycles", "1", "--seed", "7"])
    assert (done.code, done.out) == (0, f"1 folded; open {cli.out / 'report.html'}\n")
    stem = "T1_rank_001_model_1_ptm_seed_7"
    ends = [".cif", ".pdb", ".png", "_config.json", "_pae.json", "_scores.json"]
    assert cli.names() == [stem + end for end in ends]

    scores = cli.load(f"{stem}_scores.json")
    assert scores["schema_version"] == 1
    assert scores["sequences"] == [SEQUENCE]
    assert scores["model"] == "model_1_ptm"
    assert (scores["seed"], scores["num_recycles"]) == (7, 1)
    assert len(scores["plddt"]) == len(SEQUENCE)
    assert all(0 <= value <= 100 for value in scores["plddt"])
    assert scores["mean_plddt"] == pytest.approx(np.mean(scores["plddt"]), abs=0.01)
    assert scores["ranking_confidence"] == pytest.approx(scores["mean_plddt"], abs=0.01)
    assert 0 <= scores["ptm"] <= 1
    assert scores["iptm"] is None

    pae = cli.load(f"{stem}_pae.json")
    assert np.shape(pae[0]["predicted_aligned_error"]) == (10, 10)
    assert pae[0]["max_predicted_aligned_error"] == 31.75

    pdb = PDBParser(QUIET=True).get_structure("x", cli.out / f"{stem}.pdb")
    cif = MMCIFParser(QUIET=True).get_structure("x", cli.out / f"{stem}.cif")
    for structure in (pdb, cif):
        assert [residue.id[1] for residue in structure.get_residues()] == list(range(1, 11))
        assert mean_b_factors(structure) == pytest.approx(scores["plddt"], abs=0.006)
    metrics = MMCIF2Dict(cli.out / f"{stem}.cif")["_ma_qa_metric_local.metric_value"]
    assert [float(value) for value in metrics] == pytest.approx(scores["plddt"], abs=0.006)
    assert (cli.out / f"{stem}.png").read_bytes().startswith(b"\x89PNG")

    config = cli.config("T1")
    assert config["settings"] == {
        "seed": 7,
        "num_recycles": 1,
        "recycle_tolerance": 0.0,
        "num_ensemble": 1,
        "max_msa": [512, 5120],
        "precision": "fp32",
        "dropout": False,
        "cyclic": False,
        "initial_guess": None,
    }
    assert config["device"] in ("cpu", "cuda")
    assert config["chains"] == {"A": SEQUENCE}
    assert config["source"] == "input.fasta"
    assert config["versions"]["fastfold"] == fastfold.__version__
    assert config["versions"]["torch"] == torch.__version__
    assert len(config["input_hash"]) == 64
    assert (cli.out / STATE / "t1" / f"{config['input_hash']}.json").is_file()
    (line,) = read_table(cli.out / "summary.tsv")
    assert (line["target"], line["model"], line["seed"], line["rank"]) == ("T1", "model_1_ptm", "7", "1")
    assert (line["length"], line["iptm"], line["files"]) == ("10", "", stem)
    assert float(line["plddt"]) == pytest.approx(scores["mean_plddt"], rel=1e-3)
    assert float(line["seconds"]) >= 0.0
    assert line["peak_memory"] == "300"


def test_single_sequence_mode_and_the_result_are_announced(cli: CommandLine):
    done = cli.infer(cli.fasta({"T1": SEQUENCE}))
    assert "1/1 T1: 10 residues, no alignment, from the sequence alone, by model_1_ptm" in done.err
    scores = cli.scores("T1")
    result = f"pLDDT {scores['mean_plddt']:.1f}, pTM {scores['ptm']:.2f} by model_1_ptm_seed_0, best of "
    result += f"1 prediction in {cli.out}"
    assert result in done.err


@pytest.mark.long
def test_predictions_of_several_weights_are_ranked_by_confidence(cli: CommandLine):
    weights = [cli.weights("model_1_ptm"), *(cli.weights(f"model_{i}_ptm", noise=0.4 * i) for i in (2, 3))]
    assert cli.infer(cli.fasta({"T1": SEQUENCE}), weights=weights).code == 0
    scores = [cli.scores("T1", rank) for rank in (1, 2, 3)]
    confidences = [found["ranking_confidence"] for found in scores]
    assert confidences == sorted(confidences, reverse=True)
    assert len(set(confidences)) == 3
    assert {found["model"] for found in scores} == {"model_1_ptm", "model_2_ptm", "model_3_ptm"}
    found = [cli.config("T1", rank)["weights"] for rank in (1, 2, 3)]
    assert {weight["file"] for weight in found} == {path.name for path in weights}
    assert len({weight["sha256"] for weight in found}) == 3


@pytest.mark.long
def test_one_seed_gives_the_same_bytes_and_another_seed_others(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    """With more rows than cluster centres and masked positions there is much to draw."""
    monkeypatch.setattr(Background, "_start", lambda self: None)  # pictures are drawn in this process
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "T1.a3m").write_text(a3m(SEQUENCE, rows=60))
    settings = ["--num-recycles", "1", "--max-msa", "16:24"]
    runs = []
    for out, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        cli.out = cli.folder / out
        done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--msa-dir", msas, settings=[*settings, "--seed", seed])
        assert done.code == 0
        assert "60 alignment rows" in done.err
        runs.append({name.replace(f"seed_{seed}", "seed"): data for name, data in cli.contents().items()})
    first, again, other = runs
    assert first == again
    assert any(name.endswith(".png") for name in first)
    assert first.keys() == other.keys()
    for end in ("seed.pdb", "seed.cif", "_scores.json"):
        (name,) = (name for name in first if name.endswith(end))
        assert first[name] != other[name]


def test_no_recycles_is_one_pass_and_the_default_is_the_networks_own_number(cli: CommandLine):
    fasta = cli.fasta({"T1": SEQUENCE})
    done = cli.infer(fasta, settings=["--num-recycles", "0", "--no-plots"])
    assert "recycle 0/0" in done.err
    assert cli.scores("T1")["num_recycles"] == 0
    cli.out = cli.folder / "default"
    done = cli.infer(fasta, settings=["--no-plots"])
    assert [f"recycle {i}/3" in done.err for i in range(5)] == [True] * 4 + [False]
    assert cli.scores("T1")["num_recycles"] == 3


def test_bf16_is_used_and_close_to_fp32(cli: CommandLine):
    """Close: these random networks put atoms up to 17 Å from the centre, and another seed moves them by 9 Å."""
    fasta = cli.fasta({"T1": SEQUENCE})
    found = []
    for precision in ("fp32", "bf16"):
        cli.out = cli.folder / precision
        done = cli.infer(fasta, "--precision", precision, "--num-recycles", "1")
        assert done.code == 0
        assert cli.config("T1")["settings"]["precision"] == precision
        (path,) = cli.out.glob("*.pdb")
        atoms = PDBParser(QUIET=True).get_structure("x", path).get_atoms()
        found.append(([atom.coord for atom in atoms if atom.name == "CA"], cli.scores("T1")["plddt"]))
    (exact, exact_plddt), (rough, rough_plddt) = found
    assert 0 < np.linalg.norm(np.subtract(exact, rough), axis=-1).max() < 1.7
    assert rough_plddt == pytest.approx(exact_plddt, abs=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_cpu_gives(cli: CommandLine):
    fasta = cli.fasta({"T1": SEQUENCE})
    found = []
    for device in ("cpu", "cuda"):
        cli.out = cli.folder / device
        assert cli.infer(fasta, "--device", device).code == 0
        assert cli.config("T1")["device"] == device
        found.append(cli.scores("T1")["plddt"])
    assert found[1] == pytest.approx(found[0], abs=0.02)


def test_the_command_works_in_a_process_of_its_own(cli: CommandLine, ended):
    fasta, weights = cli.fasta({"T1": SEQUENCE}), cli.weights()
    process = cli.start("infer", fasta, "--out", cli.out, "--weights", weights, *QUICK)
    ended.append(process)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == f"1 folded; open {cli.out / 'report.html'}\n"
    assert "recycle 0/0 pLDDT" in err
    # The same files as in this process, byte for byte.
    first = cli.contents()
    shutil.rmtree(cli.out)
    cli.infer(fasta, weights=[weights])
    assert cli.contents() == first
