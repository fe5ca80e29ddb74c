"""Designs by two processes (design/joint.py): the sequences, tables and folds of one."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.inputs import Relaxation
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.distributed import DistributedFolder
from fastfold.parallel.distributed import DistributedContext
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.evaluate import Evaluation, Evaluator
from fastfold.products.design.joint import JointEvaluator, SharedEvaluator, planned_evaluator
from fastfold.products.design.run import TABLE
from fastfold.products.design.tasks.protocols import hallucination
from tests.helpers.command_line import CommandLine
from tests.helpers.forked import Forked, fork_command, rank_environments
from tests.helpers.results import helix_prediction

NAME = "hallucinate_seed_000"
TASK = ("hallucinate", "--length", "11", "--steps", "6,2,2", "--mutations", "1,2")


def start(cli: CommandLine, *arguments: object, out: Path, weights: str) -> list[Forked]:
    """Two processes of a design."""
    words = ["design", *arguments, "--device", "cpu", "--parallel", "dap=2"]
    words += ["--weights", cli.weights(weights, noise=0.05, is_whole=True), "--out", out]
    return [fork_command(*words, env=environment) for environment in rank_environments(2)]


def together(cli: CommandLine, *arguments: object, out: Path, weights: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of a design on two processes."""
    started = start(cli, *arguments, out=out, weights=weights)
    printed = [process.communicate(timeout=500.0) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, printed, strict=True)]


def log(out: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "trajectories" / f"{name}.jsonl").open()]


def compare(alone: Path, both: Path, names: list[str]) -> None:
    """Compare trajectories and tables within the rounding of sums in float32."""
    for name in names:
        for one, other in zip(log(alone, name), log(both, name), strict=True):
            assert (one["step"], one["stage"], one["sequence"]) == (
                other["step"],
                other["stage"],
                other["sequence"],
            )
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
            assert other["mean_plddt"] == pytest.approx(one["mean_plddt"], abs=0.05)
    tables = []
    for out in (alone, both):
        with (out / TABLE).open(newline="") as file:
            tables.append({row["name"]: row for row in csv.DictReader(file, delimiter="\t")})
    assert tables[0].keys() == tables[1].keys() >= set(names)
    for name, row in tables[0].items():
        assert tables[1][name]["sequence"] == row["sequence"]
        assert float(tables[1][name]["plddt"]) == pytest.approx(float(row["plddt"]), abs=0.1)
        assert float(tables[1][name]["rmsd"]) == pytest.approx(float(row["rmsd"]), abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["monomer", "multimer"])
def test_two_processes_design_what_one_does_and_continue_it(cli: CommandLine, kind: str) -> None:
    """With dropout, mutations, a plan, and folds of the designs; the second process is silent."""
    weights, arguments, name = "model_1_ptm", TASK, NAME
    if kind == "multimer":
        given = helix_prediction("backbone", 12).save(cli.folder / "given", plots=False)["pdb"]
        weights, name = "model_1_multimer_v3", "binder_seed_000"
        arguments = ("binder", str(given), "--length", "6", "--avoid", f"{given}:A", "--steps", "1,1,1")
        arguments += ("--give-up-below", "1")
    alone, both = cli.folder / "alone", cli.folder / "both"
    path = cli.weights(weights, noise=0.05, is_whole=True)
    done = cli.run("design", *arguments, "--device", "cpu", "--weights", path, "--out", alone)
    assert done.code == 0, done.err
    budget = ("--memory-budget", "8GiB")
    (code, out, errors), (other, silent, quiet) = together(
        cli, *arguments, *budget, out=both, weights=weights
    )
    assert (code, other) == (0, 0), errors
    assert (silent, quiet) == ("", "")
    assert "designed. Table:" in out
    assert "results go to" in errors
    assert "2 processes" in (both / "log.txt").read_text()
    compare(alone, both, [name])
    assert sorted(path.name for path in both.iterdir()) == sorted(path.name for path in alone.iterdir())
    if kind == "multimer":
        return
    # A run that is killed continues, with any number of processes.
    shutil.rmtree(both)
    state = both / "trajectories" / f"{name}.safetensors"
    killed = start(cli, *arguments, out=both, weights=weights)
    while not state.exists():
        assert killed[0].poll() is None, killed[0].communicate()
        time.sleep(0.02)
    for process in killed:
        process.kill()
        process.communicate()
    assert not (both / TABLE).exists()
    (code, out, errors), _ = together(cli, *arguments, out=both, weights=weights)
    assert code == 0, errors
    assert f"{name}: continues after step 10" in out
    compare(alone, both, [name])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--loss", "xyz=1"), "hallucinate has no loss 'xyz'"),
        pytest.param(
            ("--memory-budget", "1MiB"),
            "a gradient of 11 residues needs .* in each of 2 processes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_processes_refuse_what_one_refuses(cli: CommandLine, more: tuple[str, ...], message: str) -> None:
    (code, _, errors), (other, silent, quiet) = together(
        cli, *TASK, *more, out=cli.out, weights="model_1_ptm"
    )
    assert code in (1, 2)
    assert re.search(message, errors.replace("\n", " "))
    assert (other, silent, quiet) == (0, "", "")
    assert not cli.names()


class Here:
    """Processes of which this is the only one."""

    context = DistributedContext(0, 1, torch.device("cpu"))

    def __init__(self) -> None:
        self.calls = 0

    def together(self, make: Callable[..., Any], models: list[AlphaFold]) -> tuple[Any, Callable[..., Any]]:
        own = make(models, self.context)

        def call(*arguments: Any, **settings: Any) -> Any:
            self.calls += 1
            return own(*arguments, **settings)

        return own, call


def test_losses_come_from_all_processes_and_everything_else_from_the_first(monomer: AlphaFold) -> None:
    task, config, here = hallucination(10), DesignConfig(forbid="C", charge=(-2, 0)), Here()
    shared = SharedEvaluator(task, config, [None], [monomer], here)  # type: ignore[arg-type]
    alone = planned_evaluator(task, config, [None], [monomer])
    x = torch.randn(10, 20, generator=torch.manual_seed(0))
    found, wanted = (one(x, Relaxation(soft=0.5), seed=1) for one in (shared, alone))
    assert here.calls == 1
    assert found.losses == wanted.losses
    assert torch.equal(found.gradient, wanted.gradient)
    assert shared.designed(x) == alone.designed(x)
    assert shared.violation(x) == alone.violation(x)


def test_what_cannot_be_sent_to_other_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="define own losses at the top level of a module"):
        DistributedFolder(Here.context).together(lambda models, context: None, [])


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize(("others", "avoided"), [(2, 0), (0, 2), (1, 1)])
def test_losses_are_means_over_targets_and_over_those_avoided(
    monkeypatch: pytest.MonkeyPatch, others: int, avoided: int, gradient: bool
) -> None:
    """Means of both groups are added, and their losses have names of their own."""

    def one(number: float, name: str) -> Evaluation:
        change = torch.full((2, 20), number) if gradient else None
        empty: Any = None
        return Evaluation(number, {name: 2 * number}, change, plddt=empty, positions=empty, logits=empty)

    def evaluate(number: float, name: str) -> Any:
        def call(*arguments: Any, **settings: Any) -> Evaluation:
            calls.append((arguments, settings))
            return one(number, name)

        return call

    calls: list[Any] = []
    monkeypatch.setattr(Evaluator, "__call__", lambda self, *a, **s: evaluate(1.0, "con")(*a, **s))
    joint = JointEvaluator.__new__(JointEvaluator)
    joint._others = [evaluate(3.0 + i, "con") for i in range(others)]
    joint._avoided = [evaluate(10.0 + 2 * i, "off_con") for i in range(avoided)]
    parameters, relaxation = torch.zeros(2, 20), Relaxation()
    found = joint(parameters, relaxation, gradient=gradient, seed=3)
    targets = sum([1.0, 3.0, 4.0][: 1 + others]) / (1 + others)
    off = sum([10.0, 12.0][:avoided]) / avoided if avoided else 0.0
    assert found.loss == targets + off
    assert found.losses == {"con": 2 * targets} | ({"off_con": 2 * off} if avoided else {})
    if gradient:
        assert torch.equal(found.gradient, torch.full((2, 20), targets + off))
    else:
        assert found.gradient is None
    assert calls == [((parameters, relaxation), {"gradient": gradient, "seed": 3})] * (1 + others + avoided)
