"""``fastfold mutate``: options reach the run, which is that of ``infer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastfold.inference.runner import Summary
from fastfold.products.mutate import command, run
from tests.helpers.command_line import CommandLine


def test_options_arrive(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line names the table, if there is one."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def mutations(*arguments: Any, **more: Any) -> Summary:
        calls.append((arguments, more))
        return Summary(("a",), (), (), {"a": ("1",)})

    monkeypatch.setattr(run, "run_mutations", mutations)
    flags = ("--mutations", "all", "--positions", "3-5", "--seeds", "0-1", "--memory-budget", "2GiB")
    done = cli.run("mutate", "a.fasta", *flags, "--out", cli.out, "--weights", "w.npz")
    assert done.out == f"1 folded; results in {cli.out}\nTable: {cli.out / 'mutations.tsv'}\n"
    ((arguments, settings),) = calls
    (request,) = arguments
    assert (request.inputs, request.output, request.weights) == ([Path("a.fasta")], cli.out, (Path("w.npz"),))
    assert (request.config.seeds, request.config.budget) == ((0, 1), 2 << 30)
    assert settings == {"mutations": "all", "positions": "3-5"}
    assert command.run_mutate.__module__ == command.__name__
