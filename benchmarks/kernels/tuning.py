"""Search for the fastest launch configurations on this GPU, written into the table that ships.

Starting from the table's configuration, one block size, the warps or the stages are changed at a time. A change that
makes the operator faster is kept, until no change does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastfold.kernels
from benchmarks.kernels.cases import Case
from benchmarks.kernels.measuring import Meter
from benchmarks.kernels.rivals import OURS, implementations
from fastfold.kernels.common import tuning
from fastfold.kernels.common.tuning import TF32X3, LaunchConfig, chip_class
from fastfold.utils.atomic_files import write_atomic

TABLES = Path(fastfold.kernels.__file__).parent / "tuned"

GAIN = 0.02
"""Minimum share of the time that a change must save; less is noise."""

Lookup = Callable[[str, str, torch.device], LaunchConfig]


@contextmanager
def looked_up_by(lookup: Lookup) -> Iterator[None]:
    """Let every kernel take its configuration from ``lookup(kernel, key, device)``."""
    original = tuning.launch_config
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("fastfold.kernels") and getattr(module, "launch_config", None) is original
    ]
    try:
        for module in modules:
            module.launch_config = lookup  # type: ignore[attr-defined]
        yield
    finally:
        for module in modules:
            module.launch_config = original  # type: ignore[attr-defined]


def neighbours(config: LaunchConfig) -> list[LaunchConfig]:
    """Return configurations with one block size halved or doubled, with other warps, or with other stages."""
    found = []
    for name, size in config.blocks.items():
        for changed in (size // 2, size * 2):
            if 1 <= changed <= 256:
                found.append(replace(config, blocks=config.blocks | {name: changed}))
    for warps in (config.num_warps // 2, config.num_warps * 2):
        if 2 <= warps <= 16:
            found.append(replace(config, num_warps=warps))
    for stages in (config.num_stages - 1, config.num_stages + 1):
        if 1 <= stages <= 5:
            found.append(replace(config, num_stages=stages))
    return found


def tune(
    cases: Iterable[Case], meter: Meter, dtype: torch.dtype, deadline: float
) -> dict[tuple[str, str], LaunchConfig]:
    """Return the best configurations by kernel and key, of the kernels that time permitted.

    Args:
        cases: Cases to speed up, the most important first.
        meter: Meter of a CUDA device.
        dtype: Dtype of the inputs.
        deadline: Value of ``time.monotonic()`` after which no configuration is tried.
    """
    best: dict[tuple[str, str], LaunchConfig] = {}
    original = tuning.launch_config

    def known(kernel: str, key: str, device: torch.device) -> LaunchConfig:
        return best.get((kernel, key)) or original(kernel, key, device)

    for case in cases:
        inputs = {
            k: x.requires_grad_(k not in case.constants) for k, x in case.make(meter.device, dtype).items()
        }
        sets = meter.sets(inputs)
        ours = next(i for i in implementations(case.operator, meter.device) if i.name == OURS)

        def step(x: dict[str, Tensor], function: Callable[..., Tensor] = ours.function) -> None:
            leaves = [t for t in x.values() if t.requires_grad]
            out = function(**x)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        for kernel, key in _used(step, inputs, known):
            if (kernel, key) in best:
                continue
            best[kernel, key] = _climb(step, sets, kernel, key, known, meter, deadline)
            print(f"{case.name}: {kernel} {key} {best[kernel, key]}", flush=True)
            if time.monotonic() > deadline:
                return best
    return best


def _used(
    step: Callable[[dict[str, Tensor]], None], inputs: dict[str, Tensor], known: Lookup
) -> list[tuple[str, str]]:
    """Return the kernels and keys that a step looks up."""
    seen: dict[tuple[str, str], None] = {}

    def lookup(kernel: str, key: str, device: torch.device) -> LaunchConfig:
        seen[kernel, key] = None
        return known(kernel, key, device)

    step(inputs)  # imports the kernels' modules, which load lazily
    with looked_up_by(lookup):
        step(inputs)
    return list(seen)


def _climb(
    step: Callable[[dict[str, Tensor]], None],
    sets: list[dict[str, Tensor]],
    kernel: str,
    key: str,
    known: Lookup,
    meter: Meter,
    deadline: float,
) -> LaunchConfig:
    def cost(config: LaunchConfig) -> float:
        def lookup(name: str, of: str, device: torch.device) -> LaunchConfig:
            return config if (name, of) == (kernel, key) else known(name, of, device)

        try:
            with looked_up_by(lookup):
                return meter.time(step, sets).milliseconds
        except Exception:  # too much shared memory, or a shape that the compiler refuses
            return float("inf")

    config = known(kernel, key, meter.device)
    tried = {str(config)}
    lowest = cost(config)
    while time.monotonic() < deadline:
        better = None
        for candidate in neighbours(config):
            if str(candidate) in tried or time.monotonic() > deadline:
                continue
            tried.add(str(candidate))
            found = cost(candidate)
            if found < lowest * (1 - GAIN):
                better, lowest = candidate, found
        if better is None:
            break
        config = better
    return config


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
