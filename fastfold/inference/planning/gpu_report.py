"""``fastfold plan --fold --gpu NAME``: estimated memory and hours of a fold on GPUs that are not available."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.inference.planning.fit import plan_target
from fastfold.inference.planning.fold_time import DISK, LAUNCHES, FoldTime, fold_costs, fold_time
from fastfold.inference.planning.memory_model import FIXED_CUDA, nccl_bytes
from fastfold.inference.planning.planner import FoldPlan, Planner
from fastfold.inference.planning.report import check_sizes, count_parameters, plan_lines
from fastfold.memory import parse_bytes
from fastfold.parallel.planner.hardware import FOLDING, Rates, rates
from fastfold.parallel.planner.search import assumptions_text
from fastfold.utils.units import GIB, clock


@dataclass(frozen=True)
class GpuFold:
    """Planned fold on GPUs with their bytes and rates, and its estimated time for a number of passes."""

    plan: FoldPlan
    time: FoldTime
    planner: Planner
    budget: int
    speeds: Rates
    passes: int


def plan_on_gpus(
    config: Any,
    residues: int,
    speeds: Rates,
    *,
    gpus: int = 1,
    budget: int | None = None,
    host_memory: int = 0,
    disk: int = 0,
    rows: int | None = None,
    templates: int | None = None,
    precision: str = "bf16",
    recycles: int = 3,
) -> GpuFold:
    """Plan a fold on GPUs that need not be available; other arguments are those of :func:`.fit_target`.

    The budget is by default the data sheet's memory. Bytes of each machine's memory and disk for offloaded tensors are
    divided evenly among its GPUs. The precision is ``bf16`` or ``fp32``.

    Raises:
        InputError: The target does not fit; names a length that does.
    """
    size = 2 if precision == "bf16" else 4
    here = min(gpus, speeds.sheet.per_machine)
    planner = Planner(
        config,
        size,
        "cuda",
        costs=fold_costs(speeds, size),
        host_memory=host_memory // here,
        parameters=count_parameters(config) * size,
        disk=disk // here,
        ranks=gpus,
    )
    budget = int(speeds.sheet.memory) if budget is None else budget
    plan = plan_target(planner, residues, budget, rows=rows, templates=templates)
    fold = planner.fold(residues, rows, templates)
    time = fold_time(config, fold, plan, speeds, recycles + 1)
    return GpuFold(plan, time, planner, budget, speeds, recycles + 1)


def report_gpu_plan(options: argparse.Namespace) -> str:
    """Report the plan of a fold on GPUs; errors as those of :func:`.report_fold_plan`."""
    check_sizes(options)
    gpus = 1 if options.gpus is None else options.gpus
    if gpus < 1 or options.recycles < 0:
        raise ConfigError("--gpus must be at least 1, and --recycles at least 0")
    rows = options.msa + options.extra_msa

    def amount(text: str | None) -> int:
        return 0 if text is None else parse_bytes(text, none=True)  # the machine is another one

    found = plan_on_gpus(
        model_config(options.model),
        options.residues,
        rates(options.gpu, FOLDING, options.measured),
        gpus=gpus,
        budget=None if options.memory_budget is None else parse_bytes(options.memory_budget),
        host_memory=amount(options.host_memory),
        disk=amount(options.disk),
        rows=rows,
        templates=options.templates,
        precision=options.precision,
        recycles=options.recycles,
    )
    plan, time, speeds, planner = found.plan, found.time, found.speeds, found.planner
    spread = f"{gpus} x {speeds.sheet.name} (--parallel dap={gpus})" if gpus > 1 else speeds.sheet.name
    longest = planner.longest(found.budget, rows=rows, templates=options.templates)
    fixed = FIXED_CUDA + nccl_bytes(gpus)
    lines = [
        f"{options.model}, {options.residues:,} residues, {rows:,} alignment rows, {options.precision}, "
        f"{found.passes} passes, on {spread} with {found.budget / GIB:,.2f} GiB each "
        f"(U, the pair tensor: {plan.unit / GIB:,.3f} GiB)",
        "",
        *plan_lines(plan),
        "",
        f"memory per GPU      {plan.peak / GIB:,.2f} GiB, {plan.peak / plan.unit:.2f} U",
        f"on the host         {plan.chunks.host / GIB:,.2f} GiB per GPU, of {planner.host_memory / GIB:,.2f} GiB",
        f"on the disk         {plan.chunks.disk / GIB:,.2f} GiB per GPU, of {planner.disk / GIB:,.2f} GiB",
        f"over PCIe           {time.copied / 1e9:,.0f} GB per GPU, both ways together",
        f"between GPUs        {time.sent / 1e9:,.0f} GB sent by each",
        f"time                {time.seconds / 3600:,.2f} hours ({clock(time.seconds)}; {speeds.calibration}): "
        f"{time.computing / 3600:,.2f} computing and copying, {time.sending / 3600:,.2f} waiting for messages",
        f"longest that fits   {longest:,} residues",
        "",
        assumptions_text(speeds, training=False),
        f"assumptions: {LAUNCHES} kernels per block of rows; copies to the host overlap the contraction of a "
        f"triangle multiplication; a disk of {DISK / 1e9:g} GB/s; {fixed / GIB:.2f} GiB of each GPU are the driver's, "
        "the libraries' and NCCL's; the machine's memory and disk are divided evenly among its GPUs; not included: "
        "the search, features, templates' messages, and writing the results",
    ]
    return "\n".join(lines)
