"""``fastfold train`` and ``fastfold data``: train networks, and pack training sets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.option_fields import argument, option

_TRAIN = """\
Train a network on real structures. Everything is a setting of Hydra's groups model, data, optim, trainer, parallel,
memory, logger and finetune; a preset chooses for all of them at once.

  fastfold train +preset=overfit data.directory=1ten.pdb trainer.out=run     one structure, minutes on a CPU
  fastfold train +preset=mini data.directory=DATA trainer.out=run            a small network on a CPU
  fastfold train +preset=initial data.directory=DATA trainer.out=run         AlphaFold's initial training
  fastfold train +preset=finetune model.weights=params_model_1_ptm.npz finetune=lora data.directory=DATA ...
  fastfold train --multirun +preset=mini optim.lr=1e-3,1e-4 ...              one run for each value
  torchrun --nproc-per-node 8 -m fastfold train ...                          the same on 8 GPUs of one machine

DATA has structure files (PDB, mmCIF, .gz too), msas/<name>.a3m and perhaps an index.tsv; with data.layout=openfold it
has mmcifs/, alignments/<id>_<chain>/ and chain_data_cache.json. It may also be a file that fastfold data build made.
The folder of the run gets checkpoints, metrics, validations, the trained weights and a report. Run the same command
again to continue after an interruption.
"""


_BUILD = """\
Pack a training set into one file: its entries after the filters, and of each the structure, the alignments and the
template hits as they are read, with checksums. Training on data.directory=FILE then reads nothing else but template
structures. Settings are those of fastfold train; filters, splits and weights are fixed by the file. data.workers
processes work on it.

  fastfold data build --out set.packed data.directory=DATA data.layout=openfold data.workers=16
  fastfold train +preset=initial data.directory=set.packed trainer.out=run
"""


@dataclass(frozen=True)
class TrainOptions:
    """Settings of a training, and other things to do with them."""

    overrides: Sequence[str] = argument(
        default=(), nargs="*", metavar="OVERRIDE", help="settings, as Hydra takes them"
    )
    cfg: str | None = option(default=None, choices=("job",), help="print the whole configuration and stop")
    multirun: bool = option(
        "-m",
        "--multirun",
        default=False,
        dest="multirun",
        help="train once for each combination of settings with several values (optim.lr=1e-3,1e-4)",
    )


@dataclass(frozen=True)
class BuildOptions:
    """Settings of a training set, and its file."""

    out: str = option(is_required=True, metavar="FILE", help="file for the packed set")
    overrides: Sequence[str] = argument(
        default=(), nargs="*", metavar="OVERRIDE", help="settings, as fastfold train takes them"
    )


def add_train_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    train = commands.add_parser(
        "train",
        help="train or fine-tune a network on known structures",
        usage="fastfold train [--cfg job | --multirun] [+preset=NAME] [group=CHOICE ...] [group.key=VALUE ...]",
        description=_TRAIN,
    )
    add_field_options({"": train}, TrainOptions)
    train.set_defaults(run=run_train)


def add_data_command(commands: Any) -> None:
    """Add the subcommand ``data`` to the ``fastfold`` parser's subparsers."""
    data = commands.add_parser("data", help="prepare training sets")
    build = data.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "build",
        help="pack a training set into one file",
        usage="fastfold data build --out FILE [+preset=NAME] [data.key=VALUE ...] [model=NAME]",
        description=_BUILD,
    )
    add_field_options({"": build}, BuildOptions)
    build.set_defaults(run=run_build)


def run_build(namespace: argparse.Namespace) -> int:
    """Run the subcommand ``data build``; return the exit code, or raise FastFoldError."""
    from fastfold.training.compose import compose_config, network_config

    options = from_options(BuildOptions, namespace)
    config = compose_config(["trainer.out=.", *options.overrides])  # required, but nothing is written there
    complexes = bool(network_config(config.model).model.global_config.multimer_mode)

    from fastfold.training.data import build_packed

    build_packed(
        config.data,
        options.out,
        validate_chains=config.trainer.validate_chains,
        complexes=complexes,
        say=partial(print, flush=True),
    )
    print(f"wrote {options.out}; train on it with data.directory={options.out}")
    return 0


def run_train(namespace: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code."""
    from fastfold.training.compose import compose_config, compose_tree, to_yaml

    options = from_options(TrainOptions, namespace)
    if options.cfg:
        print(to_yaml(compose_tree(options.overrides)), end="")
        return 0
    if options.multirun:
        from fastfold.training.lifecycle.sweep import run_sweep

        return run_sweep(options.overrides, partial(print, flush=True))
    config = compose_config(options.overrides)

    from fastfold.training.run import train_until_stopped

    stopped_by = train_until_stopped(config)
    return 0 if stopped_by is None else 128 + stopped_by
