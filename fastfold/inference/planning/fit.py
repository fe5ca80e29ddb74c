"""Plan a target within the available memory, and plan again if memory runs out."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from ml_collections import ConfigDict

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import trunk_dtype
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.planning.planner import FoldPlan, Planner, parameter_bytes
from fastfold.inference.planning.time_model import measure_costs
from fastfold.kernels.common.launch import LaunchRefused
from fastfold.memory import BudgetError, HostBuffers, disk_buffers
from fastfold.utils.machine import host_available_bytes
from fastfold.utils.units import GIB

_SHARERS = ContextVar("processes of this machine that fold", default=1)


def share_host_memory(processes: int) -> None:
    """Set the number of processes on this machine that fold at the same time."""
    _SHARERS.set(max(1, processes))


def host_memory_bytes(device: str) -> int:
    """Return the bytes of host memory for offloaded tensors of this process: most of the free memory.

    It is 0 on devices that compute in the host's memory.
    """
    return 0 if device in ("cpu", "mps") else available_bytes(torch.device("cpu")) * 4 // (5 * _SHARERS.get())


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes; for a CPU, the memory available without swapping."""
    if device.type == "cuda":
        # PyTorch's unused cache of an earlier target is available to the next one.
        return torch.cuda.mem_get_info(device)[0] + _reusable_bytes(device)
    return host_available_bytes()


def _reusable_bytes(device: torch.device) -> int:
    """Return the unused bytes of PyTorch's common memory pool; that of a kept CUDA graph serves only the graph."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == (0, 0)
    )


@dataclass(frozen=True)
class FoldMemory:
    """Free bytes of one process on the device, and for offloaded tensors on the host and then on a disk."""

    free: int
    host: int = 0
    disk: int = 0

    @classmethod
    def here(
        cls,
        device: torch.device,
        *,
        host_memory: int | None = None,
        offload_dir: Path | None = None,
        processes: int = 1,
    ) -> FoldMemory:
        """Return the memory of each of the ``processes`` that fold one target on this machine, or raise ConfigError.

        ``host_memory`` limits the bytes of offloaded tensors; None for most of the free memory, and for none on a CPU.
        Tensors beyond it are in ``offload_dir`` on a disk; None for no disk.
        """
        sharers = _SHARERS.get()
        host = host_memory_bytes(device.type) if host_memory is None else host_memory // sharers
        free = available_bytes(device) // (processes if device.type == "cpu" else 1)
        disk = 0
        if offload_dir is not None:
            if not offload_dir.is_dir() or not os.access(offload_dir, os.W_OK):
                raise ConfigError(
                    f"offload_dir {str(offload_dir)!r} is not a writable folder; create it first"
                )
            disk = shutil.disk_usage(offload_dir).free * 9 // 10
        return cls(free, host // processes, disk // (processes * sharers))


def offload_buffers(host: int, offload_dir: Path | None) -> HostBuffers:
    """Return buffers for offloaded tensors in ``host`` bytes of its memory, and in a folder on a disk if given."""
    return HostBuffers(limit=host, overflow=None if offload_dir is None else disk_buffers(offload_dir))


Result = TypeVar("Result")


@dataclass(frozen=True)
class Fit:
    """Target that fits, with its plan and the arguments of :func:`fit_target`."""

    planner: Planner
    plan: FoldPlan
    budget: int
    residues: int
    name: str

    def run(self, fold: Callable[[FoldPlan], Result], say: Callable[[str], None]) -> Result:
        """Fold by the plan; if memory runs out, free it and continue with half of the budget.

        If a kernel exceeds the GPU's resources, the fold is restarted without Triton. ``say`` is told of both. An
        InputError tells that memory ran out with the smallest plan, and names a length that would fit.
        """
        fit = self
        while True:
            try:
                return fold(fit.plan)
            except LaunchRefused as error:
                say(f"warning: {self.name}: {error}; folding again without Triton's kernels, which is slower")
                refused = True
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                refused = False
            # Outside of the handler, because the exception keeps the tensors of the failed run alive.
            gc.collect()
            if self.planner.device == "cuda":
                torch.cuda.empty_cache()
            if not refused:
                fit = fit.smaller(say)

    def smaller(self, say: Callable[[str], None]) -> Fit:
        """Return the same target with half of the memory, and say so; errors as those of :meth:`run`."""
        smallest = self.planner.smallest(self.residues)
        tried = min(self.budget, self.plan.peak)
        if self.plan.peak <= smallest:
            fits = self.planner.longest(tried // 2)
            raise InputError(
                f"out of memory for {self.residues:,} residues even with the smallest blocks, which were expected to "
                f"take {tried / GIB:,.2f} GiB; in half of that about {fits:,} residues would fit: fold shorter pieces, "
                "use `precision=bf16`, close other programs, or use a device with more memory",
                record=self.name,
            )
        budget = max(tried // 2, smallest)
        say(
            f"warning: {self.name}: out of memory with a plan of {tried / GIB:,.2f} GiB; continuing with a budget of "
            f"{budget / GIB:,.2f} GiB"
        )
        plan = plan_target(self.planner, self.residues, budget, name=self.name)
        return replace(self, plan=plan, budget=budget)


def fit_target(
    model: AlphaFold,
    device: torch.device,
    residues: int,
    budget: int | None,
    *,
    name: str,
    rows: int | None = None,
    templates: int | None = None,
    config: ConfigDict = None,
    memory: FoldMemory | None = None,
    offload_dir: Path | None = None,
    ranks: int = 1,
    cuda_graph: bool = False,
) -> Fit:
    """Plan a target's fold by a network, or raise InputError with the memory needed and a length that fits.

    If the fastest plan does not fit, the costs of the alternatives are measured on the device. The budget are bytes
    including parameters; None for the device's free memory. ``rows`` of all alignments and ``templates`` are None for
    the network's maxima, ``config`` for its own configuration tree, and ``memory`` for that of this process; with
    several processes (``ranks``), it is the smallest of any. ``offload_dir`` is on a disk for tensors beyond the host's
    memory.
    """
    dtype, home = trunk_dtype(model), next(model.parameters()).device
    memory = memory or FoldMemory.here(device, offload_dir=offload_dir)
    planner = Planner(
        model.config if config is None else config,
        dtype.itemsize,
        device.type,
        host_memory=memory.host,
        parameters=parameter_bytes(model),
        host=offload_buffers(memory.host, offload_dir),
        disk=memory.disk,
        ranks=ranks,
        cuda_graph=cuda_graph,
        rows=rows,
        templates=templates,
    )
    free = memory.free + (planner.parameters if home.type == device.type else 0)
    check_fit(planner, residues, budget, free, name=name)
    budget = free if budget is None else budget
    plan = plan_target(planner, residues, budget, name=name)
    if plan.blocks:
        planner = replace(planner, costs=measure_costs(device, dtype))
        plan = plan_target(planner, residues, budget, name=name)
    return Fit(planner, plan, budget, residues, name)


def check_fit(planner: Planner, residues: int, budget: int | None, free: int, *, name: str) -> None:
    """Refuse a target whose smallest plan exceeds the ``free`` bytes, which include those of loaded parameters.

    Arguments and errors are those of :func:`fit_target`; :func:`plan_target` refuses a plan beyond the budget.
    """
    smallest = planner.smallest(residues)
    if smallest <= free or (budget is not None and smallest > budget):
        return
    halved = replace(planner, element_size=2).smallest(residues)
    fits = planner.longest(free)
    remedy = "leave out `cuda_graphs`, " if planner.cuda_graph else ""
    remedy += "use `precision=bf16`, or " if halved <= free else ""
    raise InputError(
        f"{residues:,} residues would need about {smallest / GIB:,.0f} GiB of memory"
        f"{f' in each of {planner.ranks} processes' if planner.ranks > 1 else ''}; {planner.device} has "
        f"{free / GIB:,.1f} GiB free, enough for about {fits:,} residues; {remedy}use a device with more memory, "
        "or fold shorter pieces",
        record=name,
    )


def plan_target(planner: Planner, residues: int, budget: int, *, name: str | None = None) -> FoldPlan:
    """Return the plan of a target, arguments as of :func:`fit_target`, or raise InputError with sizes that fit."""
    try:
        return planner.plan(residues, budget)
    except BudgetError as error:
        fits = planner.longest(budget)
        raise InputError(
            f"a memory budget of {budget / GIB:,.2f} GiB is too small for {residues:,} residues; the smallest that "
            f"works is {error.smallest / GIB:,.2f} GiB, and about {fits:,} residues would fit"
            f"{'; without `cuda_graphs` it takes less' if planner.cuda_graph else ''}",
            record=name,
        ) from error
