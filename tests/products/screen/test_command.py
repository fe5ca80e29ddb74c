"""``fastfold screen``: its options mean what they say, and those that it shares with ``infer`` are the same."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastfold.cli.commands.infer import add_infer_command
from fastfold.inference.alignment_search import alignment_engines
from fastfold.inference.runner import Summary
from fastfold.inference.workers import run
from fastfold.inference.workers.options import ScreenOptions, Shard, TargetLists
from fastfold.products.screen.command import add_screen_command
from tests.helpers.command_line import CommandLine


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments with which a screen was run; it ends as if one target of three had failed."""
    calls: list[tuple[Any, ...]] = []

    def screen(*arguments: Any) -> Summary:
        calls.append(arguments)
        return Summary(("a",), ("b",), (("c", "too long"),))

    monkeypatch.setattr(run, "screen", screen)
    return calls


def test_options_arrive_and_the_last_line_counts(cli: CommandLine, asked: list[tuple[Any, ...]]):
    arguments = ["pairs.csv", "--proteins", "p.fasta", "--baits", "b.fasta", "--candidates", "c.fasta"]
    arguments += [
        "--all-vs-all",
        "a.fasta",
        "--homodimers",
        "--workers",
        "3",
        "--cpus-per-worker",
        "2",
        "--ray",
    ]
    arguments += ["--shard", "2/8", "--time-limit", "1:30:00", "--memory-limit", "16GiB", "--msa-dir", "msas"]
    done = cli.run("screen", *arguments, "--out", cli.out, "--seeds", "0-2", "--weights", "w.npz")
    assert (done.code, done.out) == (1, f"1 folded, 1 finished before, 1 failed; results in {cli.out}\n")
    ((request, where),) = asked
    assert request.inputs.args[0] == TargetLists(
        inputs=(Path("pairs.csv"),),
        proteins=Path("p.fasta"),
        all_vs_all=Path("a.fasta"),
        homodimers=True,
        baits=Path("b.fasta"),
        candidates=(Path("c.fasta"),),
    )
    assert where == ScreenOptions(3, "auto", 2, 5400.0, 16 << 30, Shard(2, 8))
    assert (request.output, request.weights) == (cli.out, (Path("w.npz"),))
    assert (request.config.seeds, request.options.msa_dir) == ((0, 1, 2), Path("msas"))


def test_databases_are_named_so_that_every_machine_finds_them(
    cli: CommandLine, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(cli.folder)
    for name in ("uniref90.fasta", "a=b.fasta"):
        cli.fasta({"P1": "MKTAYIAKQR"}, name)
    cli.run("screen", "x.fasta", "--out", cli.out, "--db", "uniref90.fasta", "m=uniref90.fasta", "a=b.fasta")
    options = asked[0][0].options
    engines = alignment_engines(replace(options, sources=options.sources.absolute()))
    found = {engine.name: engine.database.path for engine in engines}
    assert found == {
        "uniref90": cli.folder / "uniref90.fasta",
        "m": cli.folder / "uniref90.fasta",
        "a_b": cli.folder / "a=b.fasta",
    }


def test_without_options_there_are_no_limits(cli: CommandLine, asked: list[tuple[Any, ...]]):
    cli.run("screen", "a.fasta", "--out", cli.out)
    assert asked[0][-1] == ScreenOptions()


def test_every_option_of_a_fold_is_that_of_infer():
    """All but those of a single process's order of work."""

    def options(add: Any, name: str) -> dict[str, Any]:
        commands = argparse.ArgumentParser().add_subparsers()
        add(commands)
        actions = commands.choices[name]._actions
        return {flag: (a.default, a.choices, a.help) for a in actions for flag in a.option_strings}

    infer, screen = options(add_infer_command, "infer"), options(add_screen_command, "screen")
    shared = infer.keys() & screen.keys()
    assert infer.keys() - shared == {"--sort", "--sort-queries-by", "--parallel", "--msa-only"}
    assert len(shared) > 30
    assert all(infer[flag] == screen[flag] for flag in shared)
