"""``fastfold plan --residues N --memory-budget …``: predicted memory of a fold, and its plan."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.planning.available_memory import host_memory_bytes
from fastfold.inference.planning.fit import plan_target
from fastfold.inference.planning.planner import FoldPlan, Planner
from fastfold.inference.planning.time_model import measure_costs
from fastfold.memory import parse_bytes
from fastfold.utils.device import choose_device
from fastfold.utils.units import GIB


def report_fold_plan(options: argparse.Namespace) -> str:
    """Report the plan of a fold by the options of the command line.

    Raises:
        ConfigError: The model is unknown, or a number is invalid.
        InputError: The budget is too small; names a sufficient one.
    """
    check_sizes(options)
    device = choose_device(options.device)
    element_size = 2 if options.precision == "bf16" else 4
    config = model_config(options.model)
    host = host_memory_bytes(device.type)
    if options.host_memory is not None:
        host = parse_bytes(options.host_memory, none=True)
    planner = Planner(
        config,
        element_size,
        device.type,
        costs=measure_costs(device, torch.bfloat16 if element_size == 2 else torch.float32),
        host_memory=host,
        disk=0 if options.disk is None else parse_bytes(options.disk, none=True),
        parameters=count_parameters(config) * element_size,
    )
    budget = parse_bytes(options.memory_budget)
    rows, templates = options.msa + options.extra_msa, options.templates
    plan = plan_target(planner, options.residues, budget, rows=rows, templates=templates)
    longest = planner.longest(budget, rows=rows, templates=templates)
    what = (
        f"{options.model}, {options.residues:,} residues, {rows:,} alignment rows, {options.precision}, on "
        f"{device.type} with {budget / GIB:,.2f} GiB (U, the pair tensor: {plan.unit / GIB:,.3f} GiB)"
    )
    lines = [what, "", *plan_lines(plan), ""]
    lines.append(f"predicted peak      {plan.peak / GIB:,.2f} GiB, {plan.peak / plan.unit:.2f} U")
    for place, nbytes in (("host", plan.chunks.host), ("disk", plan.chunks.disk)):
        if nbytes:
            lines.append(f"on the {place}         {nbytes / GIB:,.2f} GiB")
    lines.append(f"expected slow-down  {plan.slow_down:.2f} times the time without a memory limit")
    return "\n".join([*lines, f"longest that fits   {longest:,} residues"])


def check_sizes(options: argparse.Namespace) -> None:
    """Raise ConfigError for an invalid number of residues, rows or templates on the command line."""
    if options.residues < 1 or options.msa < 1 or options.extra_msa < 0 or (options.templates or 0) < 0:
        raise ConfigError(
            "--residues and --msa must be at least 1, and --extra-msa and --templates at least 0"
        )


def plan_lines(plan: FoldPlan) -> list[str]:
    """Format each step with its blocks and its peak as a table."""
    rows = [
        (name, chunks, f"{peak / GIB:.2f}", f"{peak / plan.unit:.2f}") for name, chunks, peak in plan.table()
    ]
    width = max(34, *(len(row[1]) + 2 for row in rows))
    return [
        f"{name:<26}{chunks:<{width}}{peak:>9}{in_units:>8}"
        for name, chunks, peak, in_units in [("step", "chunks", "peak GiB", "peak U"), *rows]
    ]


def count_parameters(config: Any) -> int:
    """Count the parameters of a network from one block of each stack."""
    trunk = config.model.embeddings_and_evoformer
    blocks, extra = trunk.evoformer_num_block, trunk.extra_msa_stack_num_block
    small = copy.deepcopy(config)
    small.model.embeddings_and_evoformer.evoformer_num_block = 1
    small.model.embeddings_and_evoformer.extra_msa_stack_num_block = 1
    with torch.device("meta"):
        model = AlphaFold(small)

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    return count(model) + (blocks - 1) * count(model.evoformer) + (extra - 1) * count(model.extra_msa_stack)
