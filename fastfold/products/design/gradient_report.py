"""``fastfold plan --design``: memory of a design's gradient and hours of a design, before it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.inference.planning.fit import FoldMemory
from fastfold.inference.planning.gradient_plan import GradientPlan, GradientPlanner, plan_gradients
from fastfold.inference.planning.options import PlanOptions
from fastfold.memory import parse_bytes
from fastfold.parallel.planner.hardware import TRAINING, rates
from fastfold.parallel.planner.search import assumptions_text, seconds_text
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.optimize import schedule
from fastfold.utils.device import choose_device
from fastfold.utils.units import GIB

CPU_SHARE = 0.55
"""Share of a float32 matrix product's rate that a gradient on a CPU reaches (``benchmarks/results/choices.md``)."""

_PRODUCT, _ATTEMPTS = 1024, 5


def report_gradient_plan(options: PlanOptions) -> str:
    """Report the plan of a design by one network, here or on GPUs; errors as of :func:`.report_fold_plan`."""
    gpus = 1 if options.gpus is None else options.gpus
    if options.gpu is None and options.memory_budget is None:
        raise ConfigError(
            "a plan of a design needs `gpu` or `memory_budget`, for example: 'fastfold plan --design --residues 2000 "
            "--gpu h100'"
        )
    if options.disk is not None:
        raise ConfigError("`disk` is for folds; inputs of a gradient's blocks wait in `host_memory`")
    # The planner counts gaps and libraries itself.
    assumed = replace(TRAINING, memory_share=1.0)
    speeds = None if options.gpu is None else rates(options.gpu, assumed, options.measured)
    device = choose_device(options.device).type if speeds is None else "cuda"
    if options.host_memory is None:
        host = 0 if speeds is not None else FoldMemory.here(choose_device(options.device)).host
    else:
        host = parse_bytes(options.host_memory, none=True)
    here = gpus if speeds is None else min(gpus, speeds.sheet.per_machine)
    planner = GradientPlanner(
        model_config(options.model),
        options.residues,
        options.precision,
        device=device,
        ranks=gpus,
        host_memory=host // here,
        templates=() if not options.templates else None,
        speeds=speeds,
    )
    budget = int(speeds.sheet.memory) if speeds is not None else 0
    if options.memory_budget is not None:
        budget = parse_bytes(options.memory_budget)
    plan = plan_gradients(planner, budget)
    where = device if speeds is None else speeds.sheet.name
    spread = f"{gpus} x {where} (dap={gpus})" if gpus > 1 else where
    lines = [
        f"{options.model}, a design of {options.residues:,} residues, {options.precision}, on {spread} with "
        f"{budget / GIB:,.2f} GiB{' each' if gpus > 1 else ''}",
        "",
        *gradient_plan_lines(plan, gpus),
        f"longest that fits   about {planner.longest(budget):,} residues",
    ]
    config = DesignConfig(recycles=options.recycles or 0)
    if speeds is not None:
        lines += [*_time_lines(plan.seconds, plan.forward_seconds, config), "", assumptions_text(speeds)]
    elif device == "cpu" and options.precision == "fp32" and gpus == 1:
        lines += _cpu_time_lines(plan, config, product_rate())
    return "\n".join(lines)


def _cpu_time_lines(plan: GradientPlan, config: DesignConfig, rate: float) -> list[str]:
    """Format the time of a design on a CPU from the FLOP/s of a float32 matrix product."""
    gradient, recycle = (flops / (CPU_SHARE * rate) for flops in (plan.flops, plan.forward_flops))
    return [
        *_time_lines(gradient, recycle, config),
        f"measured here       {rate / 1e9:,.0f} GFLOP/s of float32 matrix products; a gradient reaches about "
        f"{CPU_SHARE:.0%} of them",
    ]


def product_rate(clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure the FLOP/s of a float32 matrix product on this CPU; ``time.process_time`` leaves out most other work."""
    x = torch.rand(_PRODUCT, _PRODUCT)
    seconds = []
    for _ in range(_ATTEMPTS):
        start = clock()
        x @ x
        seconds.append(clock() - start)
    return 2 * _PRODUCT**3 / min(seconds)


def gradient_plan_lines(plan: GradientPlan, ranks: int = 1) -> list[str]:
    """Format peak, its parts, and what leaves the device."""
    each = " per GPU" if ranks > 1 else ""
    kept = "projections of blocks" if plan.policy.keep_projections else "no projections"
    parts = ", ".join(f"{name} {nbytes / GIB:,.2f}" for name, nbytes in plan.parts.items())
    recomputed = "blocks of the trunk, and rows outside it" if plan.policy.recompute else "nothing"
    return [
        f"predicted peak      {plan.peak / GIB:,.2f} GiB{each} ({parts} GiB)",
        f"recomputed          {recomputed}",
        f"kept                {kept}",
        f"on the host         {plan.policy.host / GIB:,.2f} GiB{each}",
    ]


def _time_lines(gradient: float, recycle: float, config: DesignConfig) -> list[str]:
    steps = schedule(config)
    seconds = sum(gradient + step.recycles * recycle for step in steps)
    return [
        f"time of a gradient  {seconds_text(gradient)}, of a recycle {seconds_text(recycle)}",
        f"time of a design    {seconds / 3600:,.2f} hours: {len(steps)} steps by one network, "
        f"{config.recycles} recycles",
    ]
