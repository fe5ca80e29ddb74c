"""How much memory a fold takes and what fits, so that a hopeless target is refused before hours are spent."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastfold.errors import InputError
from fastfold.inference.planning.planner import FoldPlan, Planner
from fastfold.memory import BudgetError
from fastfold.utils.units import GIB


def host_memory_bytes(device: str) -> int:
    """Bytes of the host's memory for what leaves a device: most of what is free; 0 where the device is the host."""
    return 0 if device == "cpu" else available_bytes(torch.device("cpu")) * 4 // 5


def available_bytes(device: torch.device) -> int:
    """Memory in bytes that is free on a device now; for a CPU, what the system can give without swapping."""
    if device.type == "cuda":
        # What PyTorch holds from an earlier target without using it is free for the next one.
        pool = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pool
    limits = [_system_memory(), *_group_memory()]
    return max(0, min(limits))


def _system_memory() -> int:
    """What the whole machine can give."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the control groups leave this process, as batch systems and containers set them (Linux, version 2)."""
    left = []
    try:
        path = next(line for line in own.read_text().splitlines() if line.startswith("0::"))
        folder = root / path.removeprefix("0::").strip("/")
        for group in (folder, *folder.parents):
            limit = (group / "memory.max").read_text().strip() if (group / "memory.max").is_file() else "max"
            if limit != "max":
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # Pages of files that were read count as used, but give way.
                idle = int(statistics["file"]) - int(statistics["shmem"])
                left.append(int(limit) - int((group / "memory.current").read_text()) + idle)
    except (OSError, StopIteration, ValueError, KeyError):
        pass
    return left


def plan_target(
    planner: Planner,
    residues: int,
    budget: int,
    *,
    name: str | None = None,
    rows: int | None = None,
    templates: int | None = None,
) -> FoldPlan:
    """The plan of a target.

    Args:
        planner: For its network and device.
        residues: Its length, all chains together.
        budget: Bytes.
        name: Its name, for the message.
        rows: Rows of all alignments; None for as many as the network takes.
        templates: Shown to the network; None for as many as it takes.

    Raises:
        InputError: The smallest plan needs more; says how much, and what would fit.
    """
    try:
        return planner.plan(residues, budget, rows=rows, templates=templates)
    except BudgetError as error:
        fits = planner.longest(budget, rows=rows, templates=templates)
        raise InputError(
            f"a memory budget of {budget / GIB:,.2f} GiB is too small for {residues:,} residues; the smallest that "
            f"works is {error.smallest / GIB:,.2f} GiB, and about {fits:,} residues would fit",
            record=name,
        ) from error


def check_fits(
    config: Any,
    residues: int,
    device: torch.device,
    *,
    element_size: int,
    name: str,
    alignment_rows: int | None = None,
    templates: int | None = None,
    budget: int | None = None,
) -> None:
    """Refuse a target that cannot fit, in whatever pieces.

    Args:
        config: Official configuration tree.
        residues: Length of the target, all chains together.
        device: Where it would be folded.
        element_size: Bytes per element of the trunk.
        name: Name of the target.
        alignment_rows: Rows of all alignments; None for as many as the network takes.
        templates: Shown to the network; None for as many as it takes.
        budget: Bytes that may be taken; None for what the device has free.

    Raises:
        InputError: The smallest plan needs more; says how much, and what fits.
    """
    planner = Planner(config, element_size, device.type, host_memory=host_memory_bytes(device.type))
    if budget is not None:
        plan_target(planner, residues, budget, name=name, rows=alignment_rows, templates=templates)

    def needed(element_size: int) -> int:
        smaller = replace(planner, element_size=element_size)
        return smaller.smallest(residues, rows=alignment_rows, templates=templates)

    free = available_bytes(device)
    if needed(element_size) <= free:
        return
    fits = planner.longest(free, rows=alignment_rows, templates=templates)
    remedies = ["take a device with more memory", "fold shorter pieces"]
    if element_size > 2 and needed(2) <= free:
        remedies.insert(0, "use --precision bf16")
    raise InputError(
        f"{residues:,} residues would need about {needed(element_size) / GIB:,.0f} GiB of memory; {device.type} has "
        f"{free / GIB:,.1f} GiB free, enough for about {fits:,} residues; " + ", or ".join(remedies),
        record=name,
    )
