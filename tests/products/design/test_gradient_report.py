"""``fastfold plan --design``: peak, parts and hours, and one clear error for what cannot be."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.inference.folding.gradients import GradientPolicy
from fastfold.inference.planning.gradient_plan import FIXED_CPU, GAPS_CPU, GradientPlan
from fastfold.parallel.planner.search import seconds_text
from fastfold.products.design import gradient_report
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.gradient_report import (
    CPU_SHARE,
    _cpu_time_lines,
    _time_lines,
    gradient_plan_lines,
    product_rate,
)
from fastfold.products.design.optimize import schedule
from fastfold.utils.units import GIB
from tests.conftest import REPOSITORY
from tests.helpers.command_line import CommandLine


@pytest.mark.slow
def test_a_design_is_planned_for_gpus_that_are_not_here(cli: CommandLine) -> None:
    done = cli.run("plan", "--design", "--residues", "2000", "--gpu", "h100", "--precision", "bf16")
    assert done.code == 0, done.err
    peak = re.search(r"predicted peak +([0-9.]+) GiB \(parameters", done.out)
    hours = re.search(r"time of a design +([0-9.]+) hours: 410 steps by one network, 0 recycles", done.out)
    assert peak is not None
    assert hours is not None
    assert 55 < float(peak[1]) < 74.51
    assert 0.1 < float(hours[1]) < 10
    assert "uncalibrated" in done.out
    refused = cli.run("plan", "--design", "--residues", "4000", "--gpu", "h100", "--precision", "bf16")
    assert refused.code == 1
    assert re.search(r"4,000 residues needs .* found 74.51 GiB; give --host-memory", refused.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs --gpu or --memory-budget"),
        (("--gpu", "h100", "--residues", "0"), "not a whole number from 1"),
        (("--gpu", "h100", "--disk", "1GiB"), "--disk is for folds"),
        (("--gpu", "h100", "--fold"), "leave out --fold"),
        (("--gpu", "x9"), "the table of GPUs lacks 'x9'"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    cli: CommandLine, arguments: tuple[str, ...], message: str
) -> None:
    done = cli.run("plan", "--design", *arguments)
    assert done.code == 2
    assert message in done.err


def test_hours_on_a_cpu_follow_the_rate_of_its_products() -> None:
    plan = GradientPlan(
        GradientPolicy(True),
        peak=1,
        parts={},
        seconds=1.0,
        forward_seconds=1.0,
        offload_from=1,
        flops=CPU_SHARE * 20e12,
        forward_flops=CPU_SHARE * 5e12,
    )
    steps = {"soft_steps": 0, "temperature_steps": 180, "hard_steps": 0}
    lines = _cpu_time_lines(plan, DesignConfig(**steps, recycles=2), 1e12)
    assert lines[0] == "time of a gradient  20 s, of a recycle 5 s"
    assert lines[1].startswith("time of a design    1.50 hours: 180 steps by one network, 2 recycles")
    assert "1,000 GFLOP/s" in lines[2]
    assert product_rate() > 1e8


def test_constants_for_cpus_are_those_that_were_measured() -> None:
    """By ``benchmarks/design.py``: no process took more than its plan, and none was much slower or faster."""
    rows = json.loads((REPOSITORY / "benchmarks" / "results" / "design.json").read_text())["cases"]
    assert len(rows) >= 4
    shares = [row["outside"] / (FIXED_CPU + GAPS_CPU * row["working"]) for row in rows]
    assert 0.8 < max(shares) <= 1.0
    for row in rows:
        assert 0.8 < CPU_SHARE / row["share"] < 1.2


def test_lines_of_a_plan_are_its_bytes_in_gib_and_its_steps() -> None:
    """Each step is a gradient and its recycles."""
    policy = SimpleNamespace(recompute=True, keep_projections=True, host=3 * GIB)
    plan: Any = SimpleNamespace(
        peak=5 * GIB // 2, parts={"parameters": GIB, "trunk": GIB // 4}, policy=policy
    )
    assert gradient_plan_lines(plan) == [
        "predicted peak      2.50 GiB (parameters 1.00, trunk 0.25 GiB)",
        "recomputed          blocks of the trunk, and rows outside it",
        "kept                projections of blocks",
        "on the host         3.00 GiB",
    ]
    policy.recompute = policy.keep_projections = False
    lines = gradient_plan_lines(plan, 2)
    assert lines[0].startswith("predicted peak      2.50 GiB per GPU (")
    assert lines[1:3] == ["recomputed          nothing", "kept                no projections"]
    assert lines[3:] == ["on the host         3.00 GiB per GPU"]
    assert gradient_plan_lines(plan, 1)[3] == "on the host         3.00 GiB"
    config = DesignConfig(soft_steps=100, temperature_steps=60, hard_steps=20, recycles=3)
    time, hours = _time_lines(10.0, 2.0, config)
    assert time == f"time of a gradient  {seconds_text(10.0)}, of a recycle {seconds_text(2.0)}"
    total = sum(10.0 + 2.0 * step.recycles for step in schedule(config)) / 3600
    assert hours == f"time of a design    {total:.2f} hours: 180 steps by one network, 3 recycles"


@pytest.mark.parametrize("gpus", [None, 1, 8, 16])
@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_plan_of_a_design_has_the_memory_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int | None, is_gpu: bool
) -> None:
    """The ranks of a machine share the memory of the host, of which a table of GPUs has none."""
    made: list[tuple[Any, ...]] = []

    class Planner:
        def __init__(self, *sizes: Any, **more: Any) -> None:
            made.append((*sizes, more))

        def longest(self, budget: int) -> int:
            return budget >> 20

    sheet = SimpleNamespace(memory=float(80 * GIB), per_machine=8, name="H100")
    monkeypatch.setattr(gradient_report, "GradientPlanner", Planner)
    monkeypatch.setattr(gradient_report, "model_config", lambda name: name)
    monkeypatch.setattr(
        gradient_report, "rates", lambda name, assumed, measured: SimpleNamespace(sheet=sheet)
    )
    monkeypatch.setattr(
        gradient_report,
        "plan_gradients",
        lambda planner, budget: SimpleNamespace(seconds=1.0, forward_seconds=2.0),
    )
    monkeypatch.setattr(gradient_report, "gradient_plan_lines", lambda plan, ranks: [f"{ranks} ranks"])
    monkeypatch.setattr(gradient_report, "assumptions_text", lambda speeds: "assumed")
    monkeypatch.setattr(gradient_report, "_time_lines", lambda *values: [f"times {values[:2]}"])
    monkeypatch.setattr(gradient_report, "_cpu_time_lines", lambda *values: ["times here"])
    monkeypatch.setattr(gradient_report, "product_rate", lambda: 1.0)
    monkeypatch.setattr(gradient_report.FoldMemory, "here", lambda device: SimpleNamespace(host=64))
    options: Any = SimpleNamespace(
        gpus=gpus, gpu="h100" if is_gpu else None, memory_budget=None if is_gpu else "2GiB", disk=None, measured=None,
        device="cpu", host_memory=None, model="model_1", residues=1500, precision="fp32", templates=2, recycles=None,
    )  # fmt: skip
    lines = gradient_report.report_gradient_plan(options).splitlines()
    ranks, budget = gpus or 1, 80 * GIB if is_gpu else 2 * GIB
    ((*sizes, more),) = made
    assert sizes == ["model_1", 1500, "fp32"]
    host = 0 if is_gpu else 64 // ranks
    assert (more["device"], more["ranks"], more["host_memory"]) == ("cuda" if is_gpu else "cpu", ranks, host)
    assert more["templates"] is None
    where = "H100" if is_gpu else "cpu"
    spread = f"{ranks} x {where} (dap={ranks})" if ranks > 1 else where
    each = " each" if ranks > 1 else ""
    assert lines[:4] == [
        f"model_1, a design of 1,500 residues, fp32, on {spread} with {budget / GIB:,.2f} GiB{each}",
        "",
        f"{ranks} ranks",
        f"longest that fits   about {budget >> 20:,} residues",
    ]
    assert lines[4:] == (["times (1.0, 2.0)", "", "assumed"] if is_gpu else ["times here"] * (ranks == 1))
    made.clear()
    options.host_memory, options.templates = "16GiB", 0
    gradient_report.report_gradient_plan(options)
    more = made[0][-1]
    assert more["templates"] == ()
    assert more["host_memory"] == 16 * GIB // (min(ranks, 8) if is_gpu else ranks)


def test_the_rate_of_products_is_that_of_the_fastest_of_five() -> None:
    """Two operations for each of 1024³ pairs of numbers."""
    times = iter([0.0, 3.0, 10.0, 12.0, 20.0, 21.5, 30.0, 34.0, 40.0, 42.0])
    assert product_rate(lambda: next(times)) == pytest.approx(2 * 1024**3 / 1.5)
    assert next(times, None) is None
