"""A target that ``fastfold infer`` cannot fold is reported, and the others go on."""

from __future__ import annotations

import re

import pytest
import torch

from fastfold.inference.folding.prediction import TargetFold
from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import OTHER, SEQUENCE


def test_a_failing_target_is_reported_and_the_others_go_on(cli: CommandLine):
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "bad.a3m").write_text(">bad\nGSHM\n")
    done = cli.infer(cli.fasta({"one": SEQUENCE, "bad": SEQUENCE, "two": OTHER}), "--msa-dir", msas)
    assert done.code == 1
    assert done.out == f"2 folded, 1 failed; open {cli.out / 'report.html'}\n"
    assert "the alignment belongs to another sequence" in done.err
    assert {name.split("_")[0] for name in cli.names()} == {"one", "two"}
    header, *lines = (cli.out / "failures.tsv").read_text().splitlines()
    assert header == "target\treason"
    assert [line.partition(":")[0] for line in lines] == [f"bad\t{msas / 'bad.a3m'} (record 'bad')"]
    log = (cli.out / "log.txt").read_text()
    for text in ("3 targets on cpu", "belongs to another sequence", "pLDDT", "2 folded, 1 failed"):
        assert text in log
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in log.splitlines())
    (msas / "bad.a3m").unlink()
    fasta = cli.fasta({"one": SEQUENCE, "bad": SEQUENCE, "w rong": "MK1"})
    assert cli.infer(fasta, "--msa-dir", msas, "--quiet").out.startswith(
        "1 folded, 1 finished before, 1 failed;"
    )
    (line,) = (cli.out / "failures.tsv").read_text().splitlines()[1:]
    assert line.startswith("w\t")
    assert (cli.out / "log.txt").read_text().count("recycle") > log.count("recycle")


def test_a_bug_that_one_target_brings_to_light_does_not_stop_the_others(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    def run(self, *arguments, **options):
        if self.target.name == "bad":
            raise TypeError("unsupported operand\nsecond line")
        return real(self, *arguments, **options)

    real = TargetFold.run
    monkeypatch.setattr(TargetFold, "run", run)
    fasta = cli.fasta({"bad": SEQUENCE, "good": OTHER})
    done = cli.infer(fasta)
    assert done.code == 1
    assert done.out.startswith("1 folded, 1 failed;")
    assert "error: bad: internal error, TypeError: unsupported operand. This is a bug" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("FASTFOLD_DEBUG", "1")
    assert "Traceback" in cli.infer(fasta).err


def test_running_out_of_memory_is_told_with_a_remedy(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TargetFold, "run", lambda *_, **__: torch.empty(1 << 52))
    done = cli.infer(cli.fasta({"T1": SEQUENCE}))
    assert done.code == 1
    assert "residues would fit: fold shorter pieces, use --precision bf16" in done.err
    assert "bug" not in done.err


def test_cuda_without_a_gpu_is_a_clear_error(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--device", "cuda")
    assert done.code == 2
    assert done.err.splitlines()[1].startswith("fastfold: no CUDA device can be used here")
    assert "--device cpu" in done.err
    assert not cli.out.exists()
