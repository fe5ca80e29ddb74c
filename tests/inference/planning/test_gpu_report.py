"""``fastfold plan`` for GPUs that are not here: memory, what waits where, bytes, hours, and what all of it assumes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.evoformer.config import model_config
from fastfold.inference.planning.report import plan_on_gpus
from fastfold.parallel.planner.hardware import ACCELERATORS, FOLDING, rates
from fastfold.utils.units import GIB
from tests.helpers.command_line import CommandLine


def test_a_fold_on_eight_gpus_is_planned_from_a_machine_without_one(cli: CommandLine) -> None:
    done = cli.run("plan", "--gpu", "h100", "--gpus", "8", "--host-memory", "256GiB", "--residues", "12000")
    assert done.code == 0, done.err
    for words in (
        "12,000 residues",
        "on 8 x h100 (--parallel dap=8) with 74.51 GiB each",
        "memory per GPU",
        "GiB per GPU, of 32.00 GiB",
        "over PCIe",
        "uncalibrated: no rate was measured on this GPU",
        "longest that fits",
        "tabulated (NVIDIA H100 data sheet",
        "assumptions: ",
    ):
        assert words in done.out
    hours = re.search(r"time +([0-9.]+) hours", done.out)
    assert hours is not None
    assert 0.01 < float(hours[1]) < 10


def test_what_does_not_fit_is_refused_with_the_length_that_does(cli: CommandLine) -> None:
    arguments = ("plan", "--fold", "--gpu", "h100", "--gpus", "8", "--residues")
    done = cli.run(*arguments, "60000")
    assert done.code == 1
    longest = re.search(r"about ([0-9,]+) residues would fit", done.err)
    assert longest is not None, done.err
    assert cli.run(*arguments, longest[1].replace(",", "")).code == 0


def test_measured_rates_calibrate_a_plan(cli: CommandLine, tmp_path: Path) -> None:
    table = {"gpu": "h100", "bandwidth": 2e12, "link": 3e11, "network": 4e10, "host_link": 5e10}
    table |= {"matrix_rates": {"bfloat16": 4e14, "float32": 3e13}}
    file = tmp_path / "rates.json"
    for left_out, words in ((None, "; measured rates)"), ("host_link", "uncalibrated: not all rates")):
        file.write_text(json.dumps({key: value for key, value in table.items() if key != left_out}))
        done = cli.run("plan", "--fold", "--gpu", "h100", "--residues", "1000", "--measured", file)
        assert words in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fold",), "fastfold plan needs --memory-budget, or --gpu"),
        (("--fold", "--gpu", "h100", "--gpus", "0"), "--gpus: '0' is not a whole number from 1"),
        (("--fold", "--gpu", "h100", "--residues", "0"), "--residues: '0' is not a whole number from 1"),
        (("--fold", "--gpu", "h1"), "the table of GPUs lacks 'h1'"),
        (("--fold", "--gpu", "h100", "--host-memory", "much"), "'much' is not an amount of memory"),
    ],
)
def test_what_makes_no_sense_is_refused(cli: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    done = cli.run("plan", *arguments)
    assert done.code == 2
    assert message in done.err


def test_thirty_thousand_residues_on_eight_gpus_of_80_gb() -> None:
    config, speeds = model_config("model_1_ptm"), rates("h100", FOLDING)
    found = plan_on_gpus(config, 30_000, speeds, gpus=8, host_memory=256 * GIB, rows=64)
    assert found.plan.peak <= 80 * 10**9
    assert 0 < found.plan.chunks.host <= 32 * GIB
    with pytest.raises(InputError, match="residues would fit"):
        plan_on_gpus(config, 30_000, speeds, gpus=4, host_memory=256 * GIB, rows=64)
    # On two machines each GPU has as much of its own.
    assert (
        plan_on_gpus(config, 30_000, speeds, gpus=16, host_memory=256 * GIB).planner.host_memory == 32 * GIB
    )


def test_every_figure_of_every_gpu_says_where_it_is_from() -> None:
    keys = {"memory", "bfloat16", "float32", "exponentials", "bandwidth", "link", "host_link", "network"}
    keys.add("per_machine")
    assert {"a100", "h100", "h200", "b200"} <= ACCELERATORS.keys()
    for sheet in ACCELERATORS.values():
        assert sheet.sources.keys() == keys
        assert all(len(source) > 10 for source in sheet.sources.values())
        assert sheet.host_link < sheet.link < sheet.bandwidth
