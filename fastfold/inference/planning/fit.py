"""Whether a target fits into memory: its plan, made once; what is said where nothing fits, and smaller plans later."""

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
    """A target that fits, and the plan to fold it by.

    Attributes:
        planner: For the network and device.
        plan: How the fold is run.
        budget: Bytes that it was made for.
        residues: Length of the target, all chains together.
        name: The target's name, for messages.
        rows: Rows of all alignments; None for as many as the network takes.
        templates: Shown to the network; None for as many as it takes.
    """

    planner: Planner
    plan: FoldPlan
    budget: int
    residues: int
    name: str
    rows: int | None = None
    templates: int | None = None

    def run(self, fold: Callable[[FoldPlan], Result], say: Callable[[str], None]) -> Result:
        """Fold by the plan; when memory ends anyway, free it and go on by a plan for half of the budget.

        Where the GPU has too little for a kernel, the fold begins again without Triton.

        Args:
            fold: Folds by a plan.
            say: Told of every smaller budget, and of a kernel that cannot run.

        Raises:
            InputError: Memory ended under the smallest plan; says what would fit.
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
            # Outside of the handler, which keeps the tensors of the failed run alive.
            _free(self.planner.device)
            if not refused:
                fit = fit.smaller(say)

    def smaller(self, say: Callable[[str], None]) -> Fit:
        """The same target with half of the memory.

        Args:
            say: Told of the smaller budget.

        Raises:
            InputError: The plan is the smallest already; says what would fit.
        """
        smallest = self.planner.smallest(self.residues, rows=self.rows, templates=self.templates)
        tried = min(self.budget, self.plan.peak)
        if self.plan.peak <= smallest:
            fits = self.planner.longest(tried // 2, rows=self.rows, templates=self.templates)
            raise InputError(
                f"the memory was not enough for {self.residues:,} residues even in the smallest pieces, which were "
                f"expected to take {tried / GIB:,.2f} GiB; in half of that about {fits:,} residues would fit: fold "
                "shorter pieces, use --precision bf16, close other programs, or take a device with more memory",
                record=self.name,
            )
        budget = max(tried // 2, smallest)
        say(
            f"warning: {self.name}: out of memory with a plan of {tried / GIB:,.2f} GiB; going on with a budget of "
            f"{budget / GIB:,.2f} GiB"
        )
        plan = plan_target(
            self.planner, self.residues, budget, name=self.name, rows=self.rows, templates=self.templates
        )
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
    """Plan a target's fold by a network, or refuse the target, before hours are spent on it.

    What the candidates for running it cost there is measured when the fastest one does not fit.

    Args:
        model: The network, wherever it is now.
        device: Where it is going to fold.
        residues: Length of the target, all chains together.
        budget: Bytes that the fold may take on the device, parameters included; None for what it has free.
        name: The target's name.
        rows: Rows of all alignments; None for as many as the network takes.
        templates: Shown to the network; None for as many as it takes.
        config: Official configuration tree to fold with, if it is not the network's own.
        memory: What there is; by default what this process finds. Of several processes the least that one has.
        offload_dir: Folder on a disk for what leaves the device and finds no room in the host's memory.
        ranks: How many processes share the target.
        cuda_graph: Whether passes are replayed from a CUDA graph.

    Raises:
        InputError: The smallest plan needs more; says how much, and what fits.
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
    smallest = planner.smallest(residues, rows=rows, templates=templates)
    if smallest > free and (budget is None or smallest <= budget):
        halved = replace(planner, element_size=2).smallest(residues, rows=rows, templates=templates)
        fits = planner.longest(free, rows=rows, templates=templates)
        remedy = "leave out --cuda-graphs, " if cuda_graph else ""
        remedy += "use --precision bf16, or " if dtype.itemsize > 2 and halved <= free else ""
        raise InputError(
            f"{residues:,} residues would need about {smallest / GIB:,.0f} GiB of memory"
            f"{f' in each of {ranks} processes' if ranks > 1 else ''}; {device.type} has "
            f"{free / GIB:,.1f} GiB free, enough for about {fits:,} residues; {remedy}take a device with more memory, "
            "or fold shorter pieces",
            record=name,
        )
    budget = free if budget is None else budget
    plan = plan_target(planner, residues, budget, name=name, rows=rows, templates=templates)
    if plan.blocks:
        planner = replace(planner, costs=measure_costs(device, dtype))
        plan = plan_target(planner, residues, budget, name=name, rows=rows, templates=templates)
    return Fit(planner, plan, budget, residues, name, rows, templates)


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
            f"works is {error.smallest / GIB:,.2f} GiB, and about {fits:,} residues would fit"
            f"{'; without --cuda-graphs it takes less' if planner.cuda_graph else ''}",
            record=name,
        ) from error


def _free(device: str) -> None:
    """Give back what nothing uses any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
