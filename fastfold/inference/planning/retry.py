"""Folds within a memory budget: refused where nothing fits, continued in smaller pieces when memory ends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from fastfold.errors import InputError
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.error_messages import is_out_of_memory
from fastfold.inference.planning.available_memory import available_bytes, host_memory_bytes, plan_target
from fastfold.inference.planning.planner import FoldPlan, Planner, parameter_bytes
from fastfold.inference.planning.time_model import measure_costs
from fastfold.utils.units import GIB

Result = TypeVar("Result")


def fold_within(
    run: Callable[[FoldPlan], Result],
    planner: Planner,
    residues: int,
    budget: int,
    *,
    name: str,
    say: Callable[[str], None],
    rows: int | None = None,
    templates: int | None = None,
) -> Result:
    """Run a fold; when memory ends all the same, free it, halve the budget and go on.

    Args:
        run: Folds by a plan.
        planner: For the network and device.
        residues: Length of the target, all chains together.
        budget: Bytes to begin with.
        name: The target's name.
        say: Told of every smaller budget.
        rows: Rows of all alignments; None for as many as the network takes.
        templates: Shown to the network; None for as many as it takes.

    Raises:
        InputError: No plan fits into the budget, or memory ended under the smallest one; says what would fit.
    """
    while True:
        plan = plan_target(planner, residues, budget, name=name, rows=rows, templates=templates)
        try:
            return run(plan)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler, which keeps the tensors of the failed run alive.
        _free(planner.device)
        smallest = planner.smallest(residues, rows=rows, templates=templates)
        tried = min(budget, plan.peak)
        if plan.peak <= smallest:
            fits = planner.longest(tried // 2, rows=rows, templates=templates)
            raise InputError(
                f"the memory was not enough for {residues:,} residues even in the smallest pieces, which were expected "
                f"to take {tried / GIB:,.2f} GiB; in half of that about {fits:,} residues would fit: fold shorter "
                "pieces, use --precision bf16, close other programs, or take a device with more memory",
                record=name,
            )
        budget = max(tried // 2, smallest)
        say(
            f"warning: {name}: out of memory with a plan of {tried / GIB:,.2f} GiB; going on with a budget of "
            f"{budget / GIB:,.2f} GiB"
        )


def fold_model(
    run: Callable[[FoldPlan], Result],
    model: AlphaFold,
    residues: int,
    budget: int | None,
    *,
    name: str,
    say: Callable[[str], None],
    rows: int | None = None,
    templates: int | None = None,
) -> Result:
    """:func:`fold_within` for a network on its device.

    What the candidates for running it cost there is measured when the fastest one does not fit.

    Args:
        run: Folds by a plan.
        model: The network.
        residues: Length of the target, all chains together.
        budget: Bytes that the fold may take, parameters included; None for what the device has free.
        name: The target's name.
        say: Told of every smaller budget.
        rows: Rows of all alignments; None for as many as the network takes.
        templates: Shown to the network; None for as many as it takes.

    Raises:
        InputError: See :func:`fold_within`.
    """
    weight = next(model.evoformer.parameters())
    device, parameters = weight.device, parameter_bytes(model)
    planner = Planner(
        model.config,
        weight.element_size(),
        device.type,
        host_memory=host_memory_bytes(device.type),
        parameters=parameters,
    )
    if budget is None:
        budget = available_bytes(device) + parameters  # which are there already
    plan = plan_target(planner, residues, budget, name=name, rows=rows, templates=templates)
    if plan.blocks:
        planner = replace(planner, costs=measure_costs(device, weight.dtype))
    return fold_within(run, planner, residues, budget, name=name, say=say, rows=rows, templates=templates)


def _free(device: str) -> None:
    """Give back what nothing uses any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
