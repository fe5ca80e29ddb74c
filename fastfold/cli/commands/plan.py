"""``fastfold plan``: memory and time of a training step or a fold, before a GPU is requested."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError
from fastfold.inference.command_line.printing import print_line

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
    parser.add_argument("--model", default="model_1", metavar="NAME", help="official name (default model_1)")
    parser.add_argument("--residues", type=int, default=256, metavar="N", help="residues (default 256)")
    parser.add_argument("--msa", type=int, default=128, metavar="N", help="rows of the MSA (default 128)")
    parser.add_argument(
        "--extra-msa", type=int, default=1024, metavar="N", help="rows of the extra MSA (default 1024)"
    )
    training = parser.add_argument_group("training on many GPUs")
    training.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    training.add_argument("--gpu", metavar="NAME", help="kind of GPU: a100, a100-40gb, h100, h200, b200")
    training.add_argument(
        "--global-batch", type=int, default=128, metavar="N", help="crops of a step (default 128)"
    )
    training.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="default bf16")
    training.add_argument(
        "--recycles", type=int, metavar="N", help="maximum recycling iterations (default 3; of a design 0)"
    )
    training.add_argument("--count", type=int, default=5, metavar="N", help="plans to print (default 5)")
    training.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="JSON of measured rates, to use in place of the data sheet's",
    )
    training.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="count one launch for each block's kernels, as if they were captured in CUDA graphs",
    )
    folding = parser.add_argument_group("folding and design")
    folding.add_argument(
        "--fold",
        action="store_true",
        help="plan a fold, not a training step (so do --memory-budget, --host-memory, --disk and --templates)",
    )
    folding.add_argument(
        "--design",
        action="store_true",
        help="plan the gradients of a design; takes the options of a fold but for --disk",
    )
    folding.add_argument(
        "--memory-budget", metavar="SIZE", help="memory that a fold or a design may take, 24GiB for example"
    )
    folding.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one"
    )
    folding.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="memory of each machine for tensors offloaded from its GPUs (default: most of the free memory here; with "
        "--gpu none)",
    )
    folding.add_argument(
        "--disk", metavar="SIZE", help="disk of each machine for tensors beyond --host-memory (default: none)"
    )
    folding.add_argument(
        "--templates", type=int, metavar="N", help="templates (default: as many as the model takes)"
    )
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise ConfigError."""
    if options.design:
        if options.fold or options.cuda_graphs:
            raise ConfigError("--design plans gradients: leave out --fold and --cuda-graphs")
        from fastfold.products.design.gradient_report import report_gradient_plan

        print(report_gradient_plan(options))
        return 0
    if options.recycles is None:
        options.recycles = 3
    of_fold = (options.memory_budget, options.host_memory, options.disk, options.templates)
    is_fold = options.fold or any(x is not None for x in of_fold)
    if options.cuda_graphs and is_fold:
        raise ConfigError(
            "--cuda-graphs is for a training step: leave it out, or leave the options of a fold out"
        )
    if options.gpu is not None and is_fold:
        from fastfold.inference.planning.report import report_gpu_plan

        print(report_gpu_plan(options))
        return 0
    if options.memory_budget is not None:
        from fastfold.inference.planning.report import report_fold_plan

        print(report_fold_plan(options))
        return 0
    if is_fold:
        raise ConfigError(
            "fastfold plan needs --memory-budget, or --gpu for a fold on another machine, for example: "
            "fastfold plan --fold --residues 12000 --gpu h100 --gpus 8"
        )
    missing = [name for name, value in (("--gpus", options.gpus), ("--gpu", options.gpu)) if value is None]
    if missing:
        raise ConfigError(
            f"fastfold plan needs {' and '.join(missing)} for a training step, for example: fastfold plan --gpus 512 "
            "--gpu h200; add --fold to plan a fold"
        )
    return _plan_training(options)


def _plan_training(options: argparse.Namespace) -> int:
    from fastfold.parallel.alphafold.workload import alphafold_workload
    from fastfold.parallel.planner.hardware import TRAINING, rates
    from fastfold.parallel.planner.search import assumptions_text, best_plans, plan_table

    speeds = rates(options.gpu, replace(TRAINING, graphed=options.cuda_graphs), options.measured)
    workload = alphafold_workload(
        options.model,
        residues=options.residues,
        msa=options.msa,
        extra_msa=options.extra_msa,
        samples=options.global_batch,
        precision=options.precision,
        recycles=options.recycles,
    )
    if options.count < 1:
        raise ConfigError(f"--count has to be at least 1, got {options.count}")
    plans = best_plans(workload, gpus=options.gpus, gpu=speeds, count=options.count, progress=print_line)
    print(f"{workload.name} ({workload.description}) on {options.gpus} x {speeds.sheet.name}\n")
    print(plan_table(plans))
    print(f"\nfastfold train {' '.join(workload.settings)} and the settings of a plan\n")
    print(assumptions_text(speeds))
    return 0
