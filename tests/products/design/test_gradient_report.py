"""``fastfold plan --design``: peak, parts and hours, and one clear error for what cannot be."""

from __future__ import annotations

import json
import re

import pytest

from fastfold.inference.folding.gradients import GradientPolicy
from fastfold.inference.planning.gradient_plan import FIXED_CPU, GAPS_CPU, GradientPlan
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.gradient_report import CPU_SHARE, _cpu_time_lines, product_rate
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
