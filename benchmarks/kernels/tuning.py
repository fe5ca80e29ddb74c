"""Search for the fastest launch configurations on this GPU, written into the table that ships.

All kernels of the cases are searched together. In every round, candidates are compiled by several processes and then
timed. The fastest is changed in the next round, and a kernel is done when no change makes it faster.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastfold.kernels
from benchmarks.kernels.candidates import (
    Builders,
    Candidate,
    Entry,
    Step,
    first_candidates,
    looked_up_by,
    lookup_of,
    neighbors,
)
from benchmarks.kernels.cases import Case
from benchmarks.kernels.measuring import Inputs, Meter
from fastfold.kernels.common.tuning import TF32X3, LaunchConfig, chip_class, launch_config
from fastfold.utils.atomic_files import write_atomic

TABLES = Path(fastfold.kernels.__file__).parent / "tuned"

GAIN = 0.02
"""Minimum share of the time that a change must save; less is noise."""

BUILD_SECONDS = 75.0
"""Maximum time that a round compiles for, and at most half of the remaining time."""


@dataclass
class _Search:
    """Search for the configuration of one kernel and key."""

    step: Step
    sets: list[Inputs]
    entry: Entry
    config: LaunchConfig
    milliseconds: float = math.inf
    started: bool = False
    done: bool = False


@dataclass(frozen=True)
class Trial:
    """Time of a kernel with one configuration."""

    shape: str  #: Operator and size of the case
    entry: Entry
    config: LaunchConfig
    milliseconds: float


def tune(
    cases: Iterable[Case],
    meter: Meter,
    dtype: torch.dtype,
    deadline: float,
    builders: Builders | None = None,
) -> tuple[dict[Entry, LaunchConfig], list[Trial]]:
    """Return the best configurations by kernel and key, of those with several trials, and all trials.

    A kernel that several cases use with one key is tuned for the first of them.

    Args:
        cases: Cases to speed up.
        meter: Meter of the device.
        dtype: Dtype of the inputs.
        deadline: Value of ``time.monotonic()`` after which no configuration is tried.
        builders: Processes that compile the configurations before they are timed.
    """
    searches = _searches(cases, meter, dtype)
    best = {entry: search.config for entry, search in searches.items()}
    tried = {(entry, str(config)) for entry, config in best.items()}
    trials: list[Trial] = []

    def measure(search: _Search, config: LaunchConfig) -> float:
        try:
            with looked_up_by(lookup_of(best | {search.entry: config})):
                found = meter.kernel_time(search.step, search.sets, search.entry[0])
        except Exception:  # too much shared memory, or a shape that the compiler refuses
            found = math.inf
        trials.append(Trial(search.step.case.name, search.entry, config, found))
        return found

    for search in searches.values():
        search.milliseconds = measure(search, search.config)
    while time.monotonic() < deadline and any(not search.done for search in searches.values()):
        candidates = [
            Candidate(search.step.case.operator, entry, config)
            for entry, search in searches.items()
            if not search.done
            for config in (neighbors if search.started else first_candidates)(search.config)
            if (entry, str(config)) not in tried
        ]
        tried |= {(candidate.entry, str(candidate.config)) for candidate in candidates}
        if builders is not None:
            seconds = min(BUILD_SECONDS, (deadline - time.monotonic()) / 2)
            candidates = builders.built(candidates, best, seconds)
        for search in searches.values():
            search.started = search.done = True
        for candidate in candidates:
            search = searches[candidate.entry]
            if time.monotonic() > deadline:
                break
            found = measure(search, candidate.config)
            if found < search.milliseconds * (1 - GAIN):
                search.config, search.milliseconds, search.done = candidate.config, found, False
        for entry, search in searches.items():
            if not search.done:
                print(
                    f"{search.step.case.name}: {entry} {search.config} {search.milliseconds:.3f} ms",
                    flush=True,
                )
                best[entry] = search.config
    compared = {entry for entry, count in Counter(trial.entry for trial in trials).items() if count > 1}
    return {entry: config for entry, config in best.items() if entry in compared}, trials


def _searches(cases: Iterable[Case], meter: Meter, dtype: torch.dtype) -> dict[Entry, _Search]:
    """Return a search for each kernel and key of the cases, from the configuration that ships."""
    searches: dict[Entry, _Search] = {}
    for case in cases:
        step = Step(case, meter.device, dtype)
        sets = meter.sets(step.inputs)
        for entry in step.entries(launch_config):
            config = launch_config(*entry, meter.device)
            searches.setdefault(entry, _Search(step, sets, entry, config))
    return searches


def trials_table(trials: Sequence[Trial]) -> str:
    """Return all trials as CSV: kernels and keys in their order, the fastest configuration first."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["case", "kernel", "key", "blocks", "warps", "stages", "milliseconds"])
    entries = list(dict.fromkeys(trial.entry for trial in trials))
    for trial in sorted(trials, key=lambda trial: (entries.index(trial.entry), trial.milliseconds)):
        blocks = " ".join(f"{name}={size}" for name, size in trial.config.blocks.items())
        warps, stages = trial.config.num_warps, trial.config.num_stages
        writer.writerow([trial.shape, *trial.entry, blocks, warps, stages, f"{trial.milliseconds:.4f}"])
    return table.getvalue()


def write_tables(
    best: dict[tuple[str, str], LaunchConfig], device: torch.device, folder: Path = TABLES
) -> list[Path]:
    """Write configurations for the class of a chip to ``<operator>.json``.

    Args:
        best: Configurations by kernel and key.
        device: Device that they were measured on.
        folder: Folder of the tables.

    Returns:
        Paths of the files that changed.
    """
    written = []
    chip = chip_class(device)
    timed = {"timed_on": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    for path in sorted(folder.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        before = json.dumps(table)
        for (kernel, key), config in best.items():
            if config.float32 != TF32X3:  # a key for tf32x3 must not get an entry of other products
                key = key.removesuffix(f"_{TF32X3}")
            if kernel in table:
                entry: dict[str, Any] = {"blocks": config.blocks, "num_warps": config.num_warps}
                entry |= {"num_stages": config.num_stages} | timed
                table[kernel].setdefault(chip, {})[key] = entry
        if json.dumps(table) != before:
            write_atomic(path, table_text(table))
            written.append(path)
    return written


def table_text(table: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Format a table as JSON, with a line for each entry."""
    kernels = []
    for kernel, chips in table.items():
        classes = []
        for chip, entries in chips.items():
            lines = [f"   {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items()]
            classes.append(f"  {json.dumps(chip)}: {{\n" + ",\n".join(lines) + "\n  }")
        kernels.append(f" {json.dumps(kernel)}: {{\n" + ",\n".join(classes) + "\n }")
    return "{\n" + ",\n".join(kernels) + "\n}\n"
