"""Options of ColabFold's users: fewer networks, other names, an archive of each target."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastfold import load_model, predict
from fastfold.data.msa.find import count_rows
from fastfold.data.targets import number_targets, target_from_sequence
from fastfold.errors import InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.models import limit_networks
from fastfold.inference.output.file_names import ARCHIVE
from fastfold.inference.output.prediction import Prediction
from tests.helpers.command_line import CommandLine


def test_an_archive_has_all_files_of_a_target(cli: CommandLine) -> None:
    weights = [cli.weights("model_1_ptm"), cli.weights("model_2_ptm", noise=0.1)]
    fasta = cli.fasta({"T1": "MKVLAAG", "T2": "GSHMW"})
    (cli.folder / "msas").mkdir()
    (cli.folder / "msas" / "T1.a3m").write_text(">T1\nMKVLAAG\n>a\nMKILAAG\n")
    arguments = (
        fasta,
        "--msa-dir",
        str(cli.folder / "msas"),
        "--num-models",
        "1",
        "--jobname-prefix",
        "my job",
        "--zip",
        "--skip-output",
        "pae_json,plots",
    )
    done = cli.infer(*arguments, weights=weights)
    assert done.code == 0, done.err
    files = cli.contents()
    archives = {f"my_job_{number}{ARCHIVE}" for number in (0, 1)}
    assert {name for name in files if name.endswith(".zip")} == archives
    assert "my_job_0_coverage.json" in files
    assert {name.rpartition("_rank_")[0] for name in files if "_rank_" in name} == {
        "my_job_0",
        "my_job_1",
    }
    assert not any("model_2" in name or name.endswith(("_pae.json", ".png")) for name in files)
    for name in archives:
        with zipfile.ZipFile(cli.out / name) as archive:
            own = {key for key in files if key.startswith(name.removesuffix(ARCHIVE)) and key != name}
            assert {member: archive.read(member) for member in archive.namelist()} == {
                key: files[key] for key in own
            }
    assert cli.scores("my_job_1")["sequences"] == ["GSHMW"]


def check_archive(cli: CommandLine, name: str) -> None:
    """The archive of a target has all its files as they are now."""
    with zipfile.ZipFile(cli.out / f"{name}{ARCHIVE}") as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    files = cli.contents()
    assert members == {key: files[key] for key in files if key.startswith(f"{name}_")}


@pytest.mark.long
def test_an_archive_is_renewed_when_ranks_change(cli: CommandLine) -> None:
    fasta, weights = cli.fasta({"T1": "MKVLAAG", "T2": "GSHMW"}), [cli.weights(noise=0.1)]
    assert cli.infer(fasta, "--zip", "--seeds", "1", weights=weights).code == 0
    before = (cli.out / f"T2{ARCHIVE}").read_bytes()
    only_first = cli.fasta({"T1": "MKVLAAG"}, "first.fasta")
    done = cli.infer(only_first, "--seeds", "0,2-4", weights=weights)
    assert done.err.count("renewed its archive, which an earlier run wrote") == 1
    check_archive(cli, "T1")
    done = cli.infer(fasta, "--seeds", "0-4", "--rank", "ptm", weights=weights)
    check_archive(cli, "T1")
    check_archive(cli, "T2")
    assert (cli.out / f"T2{ARCHIVE}").read_bytes() != before
    again = cli.infer(fasta, "--seeds", "0-4", "--rank", "ptm", weights=weights)
    assert "renewed its archive" not in again.err
    assert not list(cli.out.glob("*.tmp*"))


@pytest.mark.long
def test_an_archive_is_renewed_for_removed_and_drawn_files_and_after_a_failure(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta, weights = cli.fasta({"T1": "MKVLAAG"}), [cli.weights()]
    assert cli.infer(fasta, "--zip", "--seeds", "0-1", weights=weights).code == 0
    assert cli.infer(fasta, "--seeds", "0-1", weights=weights, settings=("--num-recycles", "0")).code == 0
    assert any(name.endswith(".png") for name in cli.contents())
    check_archive(cli, "T1")
    assert cli.infer(fasta, "--seeds", "3", "--overwrite", weights=weights).code == 0
    check_archive(cli, "T1")
    predict, seeds = TargetPredictor.predict, []

    def fail_at_second(
        self: TargetPredictor, model: AlphaFold, seed: int, *args: Any, **more: Any
    ) -> Prediction:
        seeds.append(seed)
        if len(seeds) > 1:
            raise InputError("it broke")
        return predict(self, model, seed, *args, **more)

    monkeypatch.setattr(TargetPredictor, "predict", fail_at_second)
    assert cli.infer(fasta, "--seeds", "3-6", weights=weights).code == 1
    assert seeds == [4, 5]
    check_archive(cli, "T1")


def test_a_file_that_is_no_archive_is_replaced_and_none_is_made_unasked(cli: CommandLine) -> None:
    fasta, weights = cli.fasta({"T1": "MKVLAAG"}), [cli.weights()]
    assert cli.infer(fasta, weights=weights).code == 0
    assert not (cli.out / f"T1{ARCHIVE}").exists()
    (cli.out / f"T1{ARCHIVE}").write_bytes(b"damaged")
    assert cli.infer(fasta, weights=weights).code == 0
    check_archive(cli, "T1")


def test_the_first_networks_of_each_kind_are_kept() -> None:
    class Network:
        def __init__(self, name: str) -> None:
            self.name, self.info = name, self
            self.multimer = "multimer" in name

    networks = [Network(name) for name in ("multimer_1", "1", "2", "multimer_2")]
    names = [network.name for network in limit_networks(networks, 1)]  # type: ignore[arg-type]
    assert names == ["multimer_1", "1"]
    assert limit_networks(networks, None) == networks  # type: ignore[arg-type,comparison-overlap]


def test_numbers_have_as_many_digits_as_colabfolds() -> None:
    targets = [target_from_sequence("MK", f"t{number}") for number in range(11)]
    numbered = number_targets(targets, "job/1")
    assert [target.name for target in numbered[:2]] == ["job_1_00", "job_1_01"]
    assert [target.record for target in numbered] == [target.record for target in targets]


def test_depth_counts_the_rows_of_all_chains(tmp_path: Path) -> None:
    (tmp_path / "t.a3m").write_text(">t\nMKV\n>a\nMKI\n>b\nMKL\n")
    (tmp_path / "bad.a3m").write_text(">t\nMKVL\n")
    depths = [count_rows(tmp_path, target_from_sequence("MKV", name)) for name in ("t", "bad", "none")]
    assert depths == [3, 0, 0]
    assert count_rows(None, target_from_sequence("MKV", "t")) == 0


def test_targets_with_few_rows_come_first(cli: CommandLine) -> None:
    msas = cli.folder / "msas"
    msas.mkdir()
    for name, rows in (("deep", 5), ("shallow", 2)):
        (msas / f"{name}.a3m").write_text("".join(f">{k}\nMKVLAAG\n" for k in range(rows)))
    done = cli.infer(
        *(cli.fasta({"deep": "MKVLAAG", "shallow": "MKVLAAG"}), "--msa-dir", msas, "--sort", "depth"),
    )
    assert done.code == 0, done.err
    assert done.err.index("1/2 shallow") < done.err.index("2/2 deep")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--skip-output", "msa"], "--skip-output msa: alignments stay"),
        (["--skip-output", "pictures"], "expected plots or pae_json, found 'pictures'"),
        (["--skip-output", "pae_json", "--pae", "yes"], "exclude each other"),
        (["--relax", "all", "--num-relax", "2"], "relax 'all' and num_relax exclude each other"),
    ],
)
def test_contradictions_are_refused(cli: CommandLine, arguments: list[str], expected: str) -> None:
    done = cli.infer(cli.fasta({"T1": "MK"}), *arguments)
    assert (done.code, expected in done.err) == (2, True), done.err


@pytest.mark.parametrize("sequence", ["MKVLAAG", "MKVLA:GSH:MKVLA"])
def test_a_distogram_is_written_in_the_order_of_the_input(cli: CommandLine, sequence: str) -> None:
    weights = [cli.weights("model_1_multimer_v3" if ":" in sequence else "model_1_ptm")]
    done = cli.infer(cli.fasta({"T1": sequence}), "--save-distogram", weights=weights)
    assert done.code == 0, done.err
    (path,) = cli.out.glob("T1_rank_001_*_distogram.npz")
    with np.load(path) as archive:
        probabilities, edges = archive["probabilities"], archive["bin_edges"]
    number = len(sequence.replace(":", ""))
    assert probabilities.shape == (number, number, 64)
    assert (probabilities.dtype, edges.shape) == (np.float16, (63,))
    assert np.allclose(probabilities.astype(np.float64).sum(-1), 1.0, atol=2e-3)
    assert np.allclose(probabilities, probabilities.transpose(1, 0, 2), atol=1e-3)
    model = load_model(weights[0])
    prediction = predict(sequence, model, num_recycles=0, save_representations=True, save_distogram=True)
    assert prediction.distogram is not None
    assert prediction.representations is not None
    with torch.no_grad():
        pair = torch.from_numpy(prediction.representations["pair"])
        expected = torch.softmax(model.heads["distogram"]({"pair": pair})["logits"], -1)
    assert np.allclose(prediction.distogram["probabilities"], expected.numpy(), atol=1e-3)
    again = cli.infer(cli.fasta({"T1": sequence}), "--save-distogram", weights=weights)
    assert "1 finished before" in again.out
