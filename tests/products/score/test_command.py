"""``fastfold score``: options reach the run, and workers are those of a screen."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from fastfold.inference.runner import Summary
from fastfold.inference.workers.options import ScreenOptions
from fastfold.products.score import command as score
from fastfold.products.score import run
from fastfold.products.score.run import Protocol
from tests.helpers.command_line import CommandLine


def test_options_arrive(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options of workers the plain runner scores; the last line names the table."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def scores(*arguments: Any, **more: Any) -> Summary:
        calls.append((arguments, more))
        return Summary(("a",), (), (), {"a": ("1",)})

    monkeypatch.setattr(run, "run_scores", scores)
    done = cli.run("score", "a.pdb", "--initial-guess", "--show-target", "--out", cli.out, "--seeds", "0-1")
    assert done.out == f"1 scored; results in {cli.out}\nTable: {cli.out / 'scores.tsv'}\n"
    cli.run("score", "a.pdb", "--workers", "2", "--out", cli.out)
    (first, settings), (_, with_workers) = calls
    files, request = first
    assert (files, request.output) == ([Path("a.pdb")], cli.out)
    assert (request.config.seeds, request.config.initial_guess) == ((0, 1), None)
    assert settings == {"protocol": Protocol("initial_guess", True), "workers": None}
    assert with_workers == {"protocol": Protocol(), "workers": ScreenOptions(2)}
    assert "no structure given" in cli.run("score", "--out", cli.out).err


def test_the_help_shows_the_flag_and_not_the_file() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    score.add_score_command(commands)
    options = parser.parse_args(["score", "a.pdb", "--initial-guess", "--out", "x"])
    assert (options.by_initial_guess, options.command) == (True, "score")
    assert not hasattr(options, "initial_guess")
