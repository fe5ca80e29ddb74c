"""``fastfold plan --residues N --memory-budget …``: what a fold would take, and how it would be run."""

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
    """The plan of a fold in words.

    Args:
        options: ``model``, ``residues``, ``msa`` and ``extra_msa`` (rows), ``templates``, ``precision``,
            ``memory_budget``, ``device`` and ``host_memory``, as the command line has them.

    Raises:
        ConfigError: The model is unknown, or a number makes no sense.
        InputError: The budget is too small; says which would work.
    """
    if options.residues < 1 or options.msa < 1 or options.extra_msa < 0 or (options.templates or 0) < 0:
        raise ConfigError(
            "--residues and --msa have to be at least 1, --extra-msa and --templates at least 0"
        )
    device = choose_device(options.device)
    element_size = 2 if options.precision == "bf16" else 4
    config = model_config(options.model)
    host = parse_bytes(options.host_memory) if options.host_memory else host_memory_bytes(device.type)
    planner = Planner(
        config,
        element_size,
        device.type,
        costs=measure_costs(device, torch.bfloat16 if element_size == 2 else torch.float32),
        host_memory=host if device.type == "cuda" or options.host_memory else 0,
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
    return f"{what}\n\n{plan_text(plan)}\nlongest that fits   {longest:,} residues"


def plan_text(plan: FoldPlan) -> str:
    """Peak, blocks and slow-down, a line for each step."""
    lines = [f"{'step':<26}{'chunks':<34}{'peak GiB':>9}{'peak U':>8}"]
    for name, chunks, peak in plan.table():
        lines.append(f"{name:<26}{chunks:<34}{peak / GIB:>9.2f}{peak / plan.unit:>8.2f}")
    lines.append("")
    lines.append(f"predicted peak      {plan.peak / GIB:,.2f} GiB, {plan.peak / plan.unit:.2f} U")
    if plan.chunks.host:
        lines.append(f"on the host         {plan.chunks.host / GIB:,.2f} GiB")
    lines.append(f"expected slow-down  {plan.slow_down:.2f} times the time with memory without end")
    return "\n".join(lines)


def count_parameters(config: Any) -> int:
    """Parameters of a network, without making them: those of one block of each stack count for all."""
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
