"""Plan a target within the available memory, and plan again if memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastfold.errors import InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import trunk_dtype
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.planning.available_memory import FoldMemory, offload_buffers
from fastfold.inference.planning.planner import FoldPlan, Planner, parameter_bytes
from fastfold.inference.planning.time_model import measure_costs
from fastfold.kernels.common.launch import LaunchRefused
from fastfold.memory import BudgetError
from fastfold.utils.units import GIB

Result = TypeVar("Result")


@dataclass(frozen=True)
class Fit:
    """Target that fits, with its plan and the arguments of :func:`fit_target`."""

    planner: Planner
    plan: FoldPlan
    budget: int
    residues: int
    name: str
    rows: int | None = None
    templates: int | None = None

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
        size = {"rows": self.rows, "templates": self.templates}
        smallest = self.planner.smallest(self.residues, **size)
        tried = min(self.budget, self.plan.peak)
        if self.plan.peak <= smallest:
            fits = self.planner.longest(tried // 2, **size)
            raise InputError(
                f"out of memory for {self.residues:,} residues even with the smallest blocks, which were expected to "
                f"take {tried / GIB:,.2f} GiB; in half of that about {fits:,} residues would fit: fold shorter pieces, "
                "use --precision bf16, close other programs, or use a device with more memory",
                record=self.name,
            )
        budget = max(tried // 2, smallest)
        say(
            f"warning: {self.name}: out of memory with a plan of {tried / GIB:,.2f} GiB; continuing with a budget of "
            f"{budget / GIB:,.2f} GiB"
        )
        plan = plan_target(self.planner, self.residues, budget, name=self.name, **size)
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
    config: Any = None,
    memory: FoldMemory | None = None,
    offload_dir: Path | None = None,
    ranks: int = 1,
    cuda_graph: bool = False,
) -> Fit:
    """Plan a target's fold by a network, or refuse the target.

    If the fastest plan does not fit, the costs of the alternatives are measured on the device.

    Args:
        model: The network, on any device.
        device: Device of the fold.
        residues: Length of the target, all chains together.
        budget: Bytes on the device for the fold, including parameters; None for its free memory.
        name: Name of the target.
        rows: Rows of all alignments; None for the network's maximum.
        templates: Number of templates; None for the network's maximum.
        config: Official configuration tree of the fold; None for the network's own.
        memory: Available memory; None to query this process. With several processes, the smallest of any.
        offload_dir: Folder on a disk for offloaded tensors that exceed the host's memory.
        ranks: Number of processes that share the target.
        cuda_graph: True if passes are replayed from a CUDA graph.

    Raises:
        InputError: The smallest plan exceeds the memory; names the memory needed and a length that fits.
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
    )
    free = memory.free + (planner.parameters if home.type == device.type else 0)
    size = {"rows": rows, "templates": templates}
    check_fit(planner, residues, budget, free, name=name, **size)
    budget = free if budget is None else budget
    plan = plan_target(planner, residues, budget, name=name, **size)
    if plan.blocks:
        planner = replace(planner, costs=measure_costs(device, dtype))
        plan = plan_target(planner, residues, budget, name=name, **size)
    return Fit(planner, plan, budget, residues, name, rows, templates)


def check_fit(
    planner: Planner,
    residues: int,
    budget: int | None,
    free: int,
    *,
    name: str,
    rows: int | None = None,
    templates: int | None = None,
) -> None:
    """Refuse a target whose smallest plan exceeds the ``free`` bytes, which include those of loaded parameters.

    Arguments and errors are those of :func:`fit_target`; :func:`plan_target` refuses a plan beyond the budget.
    """
    size = {"rows": rows, "templates": templates}
    smallest = planner.smallest(residues, **size)
    if smallest <= free or (budget is not None and smallest > budget):
        return
    halved = replace(planner, element_size=2).smallest(residues, **size)
    fits = planner.longest(free, **size)
    remedy = "leave out --cuda-graphs, " if planner.cuda_graph else ""
    remedy += "use --precision bf16, or " if planner.element_size > 2 and halved <= free else ""
    raise InputError(
        f"{residues:,} residues would need about {smallest / GIB:,.0f} GiB of memory"
        f"{f' in each of {planner.ranks} processes' if planner.ranks > 1 else ''}; {planner.device} has "
        f"{free / GIB:,.1f} GiB free, enough for about {fits:,} residues; {remedy}use a device with more memory, "
        "or fold shorter pieces",
        record=name,
    )


def plan_target(
    planner: Planner,
    residues: int,
    budget: int,
    *,
    name: str | None = None,
    rows: int | None = None,
    templates: int | None = None,
) -> FoldPlan:
    """Return the plan of a target, arguments as of :func:`fit_target`, or raise InputError with sizes that fit."""
    try:
        return planner.plan(residues, budget, rows=rows, templates=templates)
    except BudgetError as error:
        fits = planner.longest(budget, rows=rows, templates=templates)
        raise InputError(
            f"a memory budget of {budget / GIB:,.2f} GiB is too small for {residues:,} residues; the smallest that "
            f"works is {error.smallest / GIB:,.2f} GiB, and about {fits:,} residues would fit"
            f"{'; without --cuda-graphs it takes less' if planner.cuda_graph else ''}",
            record=name,
        ) from error
