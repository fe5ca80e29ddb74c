"""Runs of ``fastfold train --multirun``: one for each combination of values, one after another."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fastfold.errors import ConfigError
from fastfold.parallel.slurm import started_processes
from fastfold.training.compose import compose_config, parse_overrides, quoted

_OUT = "trainer.out"


def sweep_jobs(overrides: Sequence[str]) -> dict[Path, list[str]]:
    """Return the overrides of each run of a sweep by the folder of the run.

    The last of the swept settings is the fastest.

    Overrides are as on Hydra's command line; ``optim.lr=1e-3,1e-4`` and ``trainer.seed=range(3)`` have several values.
    Folders are subfolders of the given ``trainer.out``, called ``optim.lr=0.001,trainer.seed=0``.

    Raises:
        ConfigError: A run's configuration is wrong, no setting has several values, or the folder is missing.
    """
    out, fixed, swept = None, [], []
    for override in parse_overrides(overrides):
        text = str(override.input_line)
        if override.is_sweep_override():
            key = text.partition("=")[0]
            swept.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        elif override.key_or_group == _OUT:
            out = str(override.value())
        else:
            fixed.append(text)
    if not swept:
        raise ConfigError("`multirun` needs a setting with several values, for example optim.lr=1e-3,1e-4")
    if out is None:
        raise ConfigError(f"{_OUT} is not set; give {_OUT}=FOLDER, in which each run gets a folder")
    jobs = {}
    for values in itertools.product(*swept):
        name = re.sub(r"[^\w.,=+-]", "_", ",".join(value.lstrip("+~") for value in values))
        place = Path(out) / name
        jobs[place] = [*fixed, *values, f"{_OUT}={quoted(str(place))}"]  # Hydra splits at = and commas
        compose_config(jobs[place])
    return jobs


def run_sweep(overrides: Sequence[str], say: Callable[[str], None]) -> int:
    """Run every combination of :func:`sweep_jobs` in a process of its own; a run that fails does not end the others.

    ``say`` is told of the beginning and the end of each run. The result is the exit code: 0, or that of the first run
    that failed.

    Raises:
        ConfigError: As :func:`sweep_jobs`, or several processes were started.
    """
    if started_processes() > 1:
        raise ConfigError(
            "`multirun` starts runs one after another; under torchrun or srun start each run alone"
        )
    jobs, first = sweep_jobs(overrides), 0
    for number, (place, job) in enumerate(jobs.items(), 1):
        say(f"run {number} of {len(jobs)}: {place}")
        code = subprocess.run([sys.executable, "-m", "fastfold", "train", *job]).returncode
        if code:
            say(f"run {number} of {len(jobs)} ended with exit code {code}")
        first = first or code
    return first
