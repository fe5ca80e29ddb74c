"""Each command asks for what is missing, and carries out what was asked for."""

from __future__ import annotations

import argparse
from types import ModuleType, SimpleNamespace

import pytest

from fastfold.cli.commands import (
    infer,
    plan,
    relax,
    report,
    train,
)
from fastfold.cli.commands.resources import search, weights
from fastfold.products import verify as comparing
from fastfold.products.serve.commands import serve, submit
from fastfold.products.verify import command as verify
from tests.helpers.command_line import CommandLine


@pytest.mark.parametrize(
    ("given", "missing"),
    [([], "--gpus and --gpu"), (["--gpus", "8"], "--gpu for"), (["--gpu", "h200"], "--gpus for")],
)
def test_plan_asks_for_what_it_lacks(cli: CommandLine, given: list[str], missing: str) -> None:
    done = cli.run("plan", *given)
    assert done.code == 2
    assert f"fastfold plan needs {missing}" in done.err


def test_train_prints_the_whole_configuration_and_stops(cli: CommandLine) -> None:
    done = cli.run("train", "--cfg", "job", "+preset=overfit", "data.directory=x", "trainer.out=y")
    assert done.code == 0, done.err
    assert "\n  directory: x\n" in done.out
    assert "optim:" in done.out


def test_verify_fails_when_one_output_does(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(*passed: bool) -> None:
        found = [SimpleNamespace(name="x", relative_error=0.0, largest_error=0.0, passed=p) for p in passed]
        monkeypatch.setattr(comparing, "verify", lambda directory, device: iter(found))

    compared(True, True)
    done = cli.run("verify", "a", "b", "--device", "cpu")
    assert (done.code, "4 of 4 outputs agree" in done.out) == (0, True)
    compared(True, False)
    done = cli.run("verify", "a", "--device", "cpu")
    assert (done.code, "1 of 2 outputs agree" in done.out, "FAIL" in done.out) == (1, True, True)


def test_weights_tells_what_was_written(cli: CommandLine) -> None:
    target = cli.folder / "out.safetensors"
    done = cli.run("weights", "convert", cli.official_weights(), target)
    assert done.code == 0, done.err
    assert done.out.startswith(f"wrote {target}: ")
    assert cli.run("weights", "info", target).code == 0


COMMANDS = {
    infer: ["x.fasta", "--out", "out"],
    plan: [],
    relax: ["x.pdb"],
    report: ["out"],
    search: ["x.fasta", "--out", "out", "--db", "x"],
    serve: ["--data", "data"],
    submit: [],
    train: [],
    verify: ["recorded"],
    weights: ["info", "x.npz"],
}
"""What each command cannot do without."""


@pytest.mark.parametrize("module", COMMANDS, ids=lambda m: m.__name__)
def test_every_command_adds_itself_under_its_own_name(module: ModuleType) -> None:
    name = module.__name__.removesuffix(".command").rpartition(".")[2]
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    getattr(module, f"add_{name}_command")(commands)
    assert list(commands.choices) == [name]
    options = parser.parse_args([name, *COMMANDS[module]])
    assert options.run.__module__ == module.__name__
