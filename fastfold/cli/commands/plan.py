"""``fastfold plan``: memory and time of a training step or a fold, before a GPU is requested."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from fastfold.errors import ConfigError
from fastfold.inference.planning.options import PlanOptions
from fastfold.inference.progress import print_line
from fastfold.utils.command_line.from_fields import add_field_options, from_options

PLAN = """\
How to split a training step over many GPUs: every combination of data, pipeline and dynamic axial parallelism (or the
2D grid), ZeRO and activation checkpointing is costed, and the fastest that fit into memory are printed with the
settings that choose them.

  fastfold plan --model model_1 --residues 256 --msa 128 --gpus 512 --gpu h200

Time is operations over rates and bytes over links: the operations and the messages are those of the real program,
traced without data; the rates are measured ones, or shares of the data sheet's, which make times uncalibrated: within
1.5 times of steps that were published of other programs.

How to fold within a memory budget: predicted peak, sizes of the blocks, expected slow-down, longest target that fits.

  fastfold plan --residues 3000 --memory-budget 24GiB --model model_1 --msa 512

How to fold on GPUs that need not be here: memory of each, what waits on the host and on a disk, bytes over PCIe and
between GPUs, and hours, with all that is assumed.

  fastfold plan --residues 12000 --gpu h100 --gpus 8 --host-memory 256GiB

How to design by gradients: peak of a gradient, recomputation, what waits on the host, and hours of a design.

  fastfold plan --design --residues 2000 --gpu h100 --precision bf16
"""


def add_plan_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    parser = commands.add_parser(
        "plan",
        help="plan a training step on many GPUs, or a fold or a design within a memory budget",
        usage="fastfold plan --gpus N --gpu NAME [options]\n       fastfold plan --residues N --memory-budget SIZE "
        "[options]\n       fastfold plan --fold --residues N --gpu NAME [--gpus N] [options]\n       fastfold plan "
        "--design --residues N --gpu NAME [--gpus N] [options]",
        description=PLAN,
    )
    training = parser.add_argument_group("training on many GPUs")
    folding = parser.add_argument_group("folding and design")
    add_field_options({"": parser, "training": training, "folding": folding}, PlanOptions)
    parser.set_defaults(run=run_plan)


def run_plan(namespace: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise ConfigError."""
    options = from_options(PlanOptions, namespace)
    if options.design:
        if options.fold or options.cuda_graphs:
            raise ConfigError("--design plans gradients: leave out --fold and --cuda-graphs")
        from fastfold.products.design.gradient_report import report_gradient_plan

        print(report_gradient_plan(options))
        return 0
    of_fold = (options.memory_budget, options.host_memory, options.disk, options.templates)
    is_fold = options.fold or any(x is not None for x in of_fold)
    if options.cuda_graphs and is_fold:
        raise ConfigError(
            "--cuda-graphs is for a training step: leave it out, or leave the options of a fold out"
        )
    if options.gpu is not None and is_fold:
        from fastfold.inference.planning.report import report_gpu_plan

        print(report_gpu_plan(options, options.gpu))
        return 0
    if options.memory_budget is not None:
        from fastfold.inference.planning.report import report_fold_plan

        print(report_fold_plan(options, options.memory_budget))
        return 0
    if is_fold:
        raise ConfigError(
            "fastfold plan needs --memory-budget, or --gpu for a fold on another machine, for example: "
            "fastfold plan --fold --residues 12000 --gpu h100 --gpus 8"
        )
    if options.gpus is None or options.gpu is None:
        both = (("--gpus", options.gpus), ("--gpu", options.gpu))
        missing = " and ".join(name for name, value in both if value is None)
        raise ConfigError(
            f"fastfold plan needs {missing} for a training step, for example: fastfold plan --gpus 512 "
            "--gpu h200; add --fold to plan a fold"
        )
    return _plan_training(options, options.gpu, options.gpus)


def _plan_training(options: PlanOptions, gpu: str, gpus: int) -> int:
    from fastfold.evoformer.config import model_config
    from fastfold.parallel.alphafold.workload import alphafold_workload
    from fastfold.parallel.planner.hardware import TRAINING, rates
    from fastfold.parallel.planner.search import assumptions_text, best_plans, plan_table

    speeds = rates(gpu, replace(TRAINING, graphed=options.cuda_graphs), options.measured)
    workload = alphafold_workload(
        model_config(options.model),
        residues=options.residues,
        msa=options.msa,
        extra_msa=options.extra_msa,
        samples=options.global_batch,
        precision=options.precision,
        recycles=options.num_recycles,
        name=options.model,
    )
    plans = best_plans(workload, gpus=gpus, gpu=speeds, count=options.count, progress=print_line)
    print(f"{workload.name} ({workload.description}) on {gpus} x {speeds.sheet.name}\n")
    print(plan_table(plans))
    print(f"\nfastfold train {' '.join(workload.settings)} and the settings of a plan\n")
    print(assumptions_text(speeds))
    return 0
