"""``fastfold plan --design``: peak, parts and hours, and one clear error for what cannot be."""

from __future__ import annotations

import re

import pytest

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
        (("--gpu", "h100", "--residues", "0"), "must be at least 1"),
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
