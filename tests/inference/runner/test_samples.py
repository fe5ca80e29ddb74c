"""Samples in ``fastfold infer`` and in Python: names, alignments, resuming."""

from __future__ import annotations

import numpy as np
import pytest

import fastfold
from fastfold.inference.output.file_names import fastfold_name, file_name, prediction_key
from fastfold.inference.output.summary import read_table
from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import SEQUENCE, a3m


def test_samples_add_predictions_that_are_not_made_again(cli: CommandLine):
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "T1.a3m").write_text(a3m(SEQUENCE, rows=30))
    fasta, weights = cli.fasta({"T1": SEQUENCE}), [cli.weights()]

    def run(*more: str):
        return cli.infer(fasta, "--msa-dir", msas, *more, weights=weights)

    assert run("--sample", "columns", "--samples", "2", "--sample-fraction", "0.4").code == 0
    before = set(cli.contents().values())
    done = run("--sample", "columns", "--samples", "3", "--sample-fraction", "0.4")
    assert done.code == 0
    assert "seed 0 columns_003 recycle" in done.err
    assert "columns_001 recycle" not in done.err
    assert before <= set(cli.contents().values())
    again = run("--sample", "columns", "--samples", "3", "--sample-fraction", "0.4")
    assert again.out.startswith("0 folded, 1 finished before")
    lines = read_table(cli.out / "summary.tsv")
    assert sorted(line["sample"] for line in lines) == ["columns_001", "columns_002", "columns_003"]
    assert all(line["files"].endswith(f"_seed_0_{line['sample']}") for line in lines)
    for line in lines:
        _, *rows = (cli.out / f"{line['files']}_msa.a3m").read_text().splitlines()[1::2]
        letters = np.array([list(row) for row in rows])
        assert (letters == "X").all(0).sum() == 4
    scores = cli.scores("T1")
    assert scores["sample"]["method"] == "columns"
    assert scores["sample"]["fraction"] == 0.4


def test_python_has_the_samples_of_the_command(cli: CommandLine):
    rows = a3m(SEQUENCE, rows=30).splitlines()[1::2]
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "T1.a3m").write_text(a3m(SEQUENCE, rows=30))
    weights = cli.weights()
    assert cli.infer(cli.fasta({"T1": SEQUENCE}), "--msa-dir", msas, "--sample", "depth", "--sample-depths", "4,8",
                     weights=[weights]).code == 0  # fmt: skip
    model = fastfold.load_model(weights)
    sampling = fastfold.Sampling("depth", depths=(4, 8))
    found = fastfold.predict_many(
        {"T1": SEQUENCE}, model, msas={"T1": rows}, num_recycles=0, sample=sampling
    )["T1"]
    assert [one.sample["depth"] for one in sorted(found, key=lambda one: one.key)] == [4, 8]
    for rank, one in enumerate(found, 1):
        read = fastfold.Prediction.load(cli.out, rank=rank)
        assert read.key == one.key
        assert np.abs(read.atom_positions - one.atom_positions).max() < 1e-3


@pytest.mark.parametrize("ending", [".pdb", "_scores.json", "_msa.a3m", "_msa_A.a3m", "_msa_B_paired.a3m"])
def test_files_of_samples_are_found_under_colabfolds_names(ending: str):
    key = prediction_key("model_1_ptm", 0, "colabfold", sample="columns_003")
    assert key == "alphafold2_ptm_model_1_seed_000_columns_003"
    name = file_name("T1", 2, key, ending, "colabfold")
    assert fastfold_name(name) == f"T1_rank_002_{key}{ending}"
