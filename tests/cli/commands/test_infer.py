"""``fastfold infer`` hands on what was asked for, all of it and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastfold.inference import runner
from fastfold.inference.request import InferRequest
from tests.helpers.command_line import CommandLine


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command runs, without running it: two targets folded, one done before, one failed."""
    found: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> runner.Summary:
        found.append(arguments)
        return runner.Summary(("a", "b"), ("c",), (("d", "too long"),))

    monkeypatch.setattr(runner, "run", run)
    return found


def test_defaults_are_those_of_the_configuration(cli: CommandLine, runs: list[tuple[Any, ...]]) -> None:
    done = cli.run("infer", "x.fasta", "y.fasta", "--out", "there")
    assert runs == [(InferRequest([Path("x.fasta"), Path("y.fasta")], Path("there")),)]
    assert (done.code, done.out) == (1, "2 folded, 1 finished before, 1 failed; results in there\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--weights", "a.npz", "b.fasta"], "b.fasta: every name after --weights is a weights file"),
        ([], "no input given; fastfold infer --help"),
        (["x", "--seeds", "1", "--seed", "2"], "leave out --seed and --num-seeds"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(
    cli: CommandLine, runs: list[tuple[Any, ...]], given: list[str], message: str
) -> None:
    done = cli.run("infer", *given, "--out", "there")
    assert (done.code, runs) == (2, [])
    assert message in done.err


@pytest.mark.parametrize("given", ["--num-recycles -1", "--seed 2147483648", "--seed ٣", "--device tpu"])
def test_values_of_another_kind_are_wrong_use(
    cli: CommandLine, runs: list[tuple[Any, ...]], given: str
) -> None:
    done = cli.run("infer", "x.fasta", "--out", "there", *given.split())
    assert (done.code, runs) == (2, [])
    assert given.split()[0] in done.err


def test_under_torchrun_the_first_process_alone_speaks(
    cli: CommandLine, runs: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    done = cli.run("infer", "x.fasta", "--out", "there")
    assert (done.code, done.out, len(runs)) == (0, "", 1)
