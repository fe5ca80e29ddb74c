"""Launch configurations that are tried: the kernels take one, and processes compile many at once."""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, cases
from benchmarks.kernels.measuring import Inputs
from benchmarks.kernels.recording import launches_observed
from benchmarks.kernels.rivals import OURS, implementations
from fastfold.kernels.common import backend, tuning
from fastfold.kernels.common.tuning import LaunchConfig

SMALL = 64
"""Residues of the inputs that candidates are compiled with; their sizes are divisible by 16, as larger ones are."""

MOST_SPILLS = 1200
"""Bytes per thread that a kernel may spill and still be fast, around its loops rather than in them."""

Entry = tuple[str, str]
"""Kernel and key of an entry in the table of configurations."""

Lookup = Callable[[str, str, torch.device], LaunchConfig]

_TABLE = tuning.launch_config


def lookup_of(configs: Mapping[Entry, LaunchConfig]) -> Lookup:
    """Return a lookup that finds these configurations, and all others in the table."""

    def lookup(kernel: str, key: str, device: torch.device) -> LaunchConfig:
        return configs.get((kernel, key)) or _TABLE(kernel, key, device)

    return lookup


@contextmanager
def looked_up_by(lookup: Lookup) -> Iterator[None]:
    """Let every kernel take its configuration from ``lookup(kernel, key, device)``.

    A kernel that needs more than the GPU has leaves the device to PyTorch only until the end.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("fastfold.kernels") and getattr(module, "launch_config", None) is _TABLE
    ]
    try:
        for module in modules:
            module.launch_config = lookup  # type: ignore[attr-defined]
        with mock.patch.dict(backend._refused):
            yield
    finally:
        for module in modules:
            module.launch_config = _TABLE  # type: ignore[attr-defined]


class Step:
    """Forward and backward pass of a case by FastFold's kernels.

    Args:
        case: Operator and size.
        device: Device of the inputs.
        dtype: Dtype of the inputs.
    """

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case = case
        self.inputs: Inputs = {
            name: x.requires_grad_(name not in case.constants) for name, x in case.make(device, dtype).items()
        }
        ours = next(found for found in implementations(case.operator, device) if found.name == OURS)
        self._function = ours.function

    def __call__(self, inputs: Inputs) -> None:
        """Compute the gradients of all inputs but constants."""
        leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        out = self._function(**inputs)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    def entries(self, lookup: Lookup) -> list[Entry]:
        """Return the entries that a step looks up."""
        seen: dict[Entry, None] = {}

        def noting(kernel: str, key: str, device: torch.device) -> LaunchConfig:
            seen[kernel, key] = None
            return lookup(kernel, key, device)

        self(self.inputs)  # imports the kernels' modules, which load lazily
        with looked_up_by(noting):
            self(self.inputs)
        return list(seen)


@dataclass(frozen=True)
class Candidate:
    """Configuration to try for an entry that a case uses."""

    operator: str  #: Operator of the case
    entry: Entry
    config: LaunchConfig


class Builders:
    """Processes that compile candidates into Triton's cache on disk, where this process finds them.

    Args:
        dtype: Dtype of the inputs.
        count: Number of processes. Default: one per core, except one.
    """

    def __init__(self, dtype: torch.dtype, count: int | None = None) -> None:
        self._dtype, self._count = dtype, count or max(1, (os.cpu_count() or 2) - 1)
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"))

    def built(
        self, candidates: Sequence[Candidate], best: Mapping[Entry, LaunchConfig], seconds: float
    ) -> list[Candidate]:
        """Return the candidates that compile in time, and spill few registers if any.

        Args:
            candidates: Configurations to compile.
            best: Configurations of other entries.
            seconds: Time limit; candidates that are not done are left out.
        """
        tasks = {
            self._pool.submit(_spills, candidate, dict(best), self._dtype): candidate
            for candidate in candidates
        }
        done, late = wait(tasks, timeout=max(0.0, seconds))
        if late:  # they must not use the GPU while others are timed
            self.close()
            self._pool = self._start()
        return [tasks[task] for task in tasks if task in done and task.result() <= MOST_SPILLS]

    def close(self) -> None:
        """End the processes, whatever they do."""
        processes = list(self._pool._processes.values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


@functools.cache
def _small_step(operator: str, dtype: torch.dtype) -> Step:
    found = cases((SMALL,), ((SMALL, SMALL),))
    step = Step(next(case for case in found if case.operator == operator), torch.device("cuda"), dtype)
    step(step.inputs)  # imports the kernels' modules, which load lazily
    return step


def _spills(candidate: Candidate, best: dict[Entry, LaunchConfig], dtype: torch.dtype) -> float:
    """Compile and run a candidate; return the bytes per thread that its kernel spills, infinity if it does not run."""
    step = _small_step(candidate.operator, dtype)
    compiled: list[Any] = []
    try:
        with (
            looked_up_by(lookup_of(best | {candidate.entry: candidate.config})),
            launches_observed(candidate.entry[0], lambda run: compiled.append(run())),
        ):
            step(step.inputs)
        torch.cuda.synchronize()
        return max(4.0 * kernel.n_spills for kernel in compiled)
    except Exception:  # too much shared memory, or a shape that the compiler refuses
        return math.inf


def first_candidates(config: LaunchConfig, most: int = 64) -> list[LaunchConfig]:
    """Return configurations for the first round: with one or two changes, and with blocks of 64 and 128 rows.

    Those with two changes are a sample, equal in every run, if there are more than ``most``. A product of 64 rows is
    the smallest for which Hopper's tensor cores read their factors from shared memory.
    """
    single = neighbors(config)
    double = _distinct((again for once in single for again in neighbors(once)), without=[config, *single])
    sample = random.Random(0).sample(double, min(len(double), max(0, most - len(single))))
    return _distinct([*_large_blocks(config), *single, *sample], without=[config])


def neighbors(config: LaunchConfig) -> list[LaunchConfig]:
    """Return configurations with one change: a block size or the warps halved or doubled, or another stage."""
    found = []
    for name, size in config.blocks.items():
        for changed in (size * 2, size // 2):
            if 1 <= changed <= 256:
                found.append(replace(config, blocks=config.blocks | {name: changed}))
    for warps in (config.num_warps * 2, config.num_warps // 2):
        if 2 <= warps <= 16:
            found.append(replace(config, num_warps=warps))
    for stages in (config.num_stages - 1, config.num_stages + 1):
        if 1 <= stages <= 5:
            found.append(replace(config, num_stages=stages))
    return found


def _large_blocks(config: LaunchConfig) -> list[LaunchConfig]:
    """Return configurations with 64 or 128 rows, 32 or 64 columns, 4 or 8 warps, and one or two stages."""
    if "BM" not in config.blocks:
        return []
    columns = [name for name in ("BH", "BO") if name in config.blocks]
    return [
        replace(
            config,
            blocks=config.blocks | {"BM": rows} | dict.fromkeys(columns, width),
            num_warps=warps,
            num_stages=stages,
        )
        for rows, width, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (1, 2))
    ]


def _distinct(configs: Iterable[LaunchConfig], without: Iterable[LaunchConfig]) -> list[LaunchConfig]:
    left_out = {str(config) for config in without}
    return list({str(config): config for config in configs if str(config) not in left_out}.values())
