"""Commands that share the runner of ``fastfold infer``: they resume after a kill, and obey a memory budget."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import fastfold
from fastfold.cli import main
from fastfold.inference.folding.predictor import TargetPredictor
from tests.helpers.command_line import QUICK, CommandLine
from tests.helpers.forked import Forked
from tests.inference.runner.inputs import OTHER, SEQUENCE, a3m

COMMANDS = ("sample", "score", "mutate", "embed")


def arguments_of(command: str, cli: CommandLine) -> list[str | Path]:
    """A command with several predictions, without its folder of results."""
    weights = ["--weights", cli.weights(), "--device", "cpu"]
    if command == "score":
        for name in ("one", "two", "three"):
            prediction = fastfold.predict(SEQUENCE, weights[1], name=name, num_recycles=0, device="cpu")
            prediction.save(cli.folder / name, plots=False)
        files = [next((cli.folder / name).glob("*.pdb")) for name in ("one", "two", "three")]
        return ["score", *files, "--initial-guess", *QUICK, *weights]
    if command == "mutate":
        return ["mutate", cli.fasta({"T1": SEQUENCE}), "--mutations", "K2A,T3W", *QUICK, *weights]
    if command == "embed":
        records = {"T1": SEQUENCE, "T2": OTHER, "T3": SEQUENCE[1:]}
        return ["embed", cli.fasta(records), "--num-recycles", "0", *weights]
    msas = cli.folder / "msas"
    msas.mkdir()
    (msas / "T1.a3m").write_text(a3m(SEQUENCE, rows=30))
    sample = ["--sample", "columns", "--samples", "3", "--msa-dir", msas]
    return ["infer", cli.fasta({"T1": SEQUENCE}), *sample, *QUICK, *weights]


def _killed(arguments: Sequence[str]) -> int:
    """``fastfold``, killed as its second prediction begins."""
    calls = []
    for name in ("predict", "embed"):
        plain = getattr(TargetPredictor, name)

        def killing(self, *more, plain=plain, **named):
            calls.append(None)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *more, **named)

        setattr(TargetPredictor, name, killing)
    return main(list(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_command_continues_and_ends_as_one_that_was_not(cli: CommandLine, command: str) -> None:
    arguments = arguments_of(command, cli)
    whole, out = cli.folder / "whole", cli.folder / "out"
    assert cli.run(*arguments, "--out", whole).code == 0
    process = Forked(_killed, [str(one) for one in (*arguments, "--out", out)])
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if _is_result(path)}
    assert kept
    done = cli.run(*arguments, "--out", out)
    assert done.code == 0, done.err
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    results = [path for path in whole.iterdir() if _is_result(path)]
    assert len(results) == 3
    for path in results:
        assert _content(out / path.name) == _content(path)
    # Ranks may change names; the files that were there are kept, not made again.
    times = {path.stat().st_mtime_ns for path in out.iterdir() if _is_result(path)}
    assert set(kept.values()) <= times
    again = cli.run(*arguments, "--out", out)
    assert re.match("0 (folded|scored|embedded), [13] finished before", again.out), again.out


def _is_result(path: Path) -> bool:
    return path.suffix in (".pdb", ".safetensors")


def _content(path: Path) -> object:
    """Text of a structure, or bytes of each array, whose order in the file is random."""
    if path.suffix == ".pdb":
        return path.read_text()
    return {name: array.tobytes() for name, array in load_file(path).items()}


@pytest.mark.parametrize(
    "command", [*(pytest.param(c, marks=pytest.mark.slow) for c in COMMANDS[:3]), COMMANDS[3]]
)
def test_a_budget_is_obeyed(cli: CommandLine, command: str) -> None:
    """One that is too small names the smallest, which works."""
    arguments = [*arguments_of(command, cli), "--out", cli.out]
    done = cli.run(*arguments, "--memory-budget", "1MiB")
    assert done.code == 1
    found = re.search(r"too small for \d+ residues; the smallest that works is ([0-9.]+) GiB", done.err)
    assert found is not None, done.err
    assert not [path for path in cli.out.glob("*") if _is_result(path)]
    done = cli.run(*arguments, "--memory-budget", f"{float(found[1]) + 0.005:.3f}GiB")
    assert done.code == 0, done.err
