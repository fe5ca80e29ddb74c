"""``fastfold screen``: fold thousands of targets, all pairs of a list, or baits with candidates."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from fastfold.inference.command_line.fold_options import add_fold_options, add_inputs, infer_request
from fastfold.inference.command_line.printing import announce, print_summary
from fastfold.inference.workers.options import ScreenOptions, TargetLists
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.command_line.help_all import finish_command
from fastfold.utils.lazy import imports_without_collection

_SCREEN = """\
Fold many targets with several workers, on this machine or on a Ray cluster, into one folder of results. Networks stay
loaded, long targets come first, results appear as they are finished, and a lost worker is replaced. Run the same
command again to continue after any interruption: finished targets are not folded again.

  fastfold screen targets.fasta --out DIR --weights params_model_1_ptm.npz --workers 4
  fastfold screen --baits bait.fasta --candidates proteome.fasta --out DIR --weights params_model_*_multimer_v3.npz
  fastfold screen --all-vs-all complex.fasta --out DIR --weights ... --msa-dir alignments --ray auto
  fastfold screen pairs.csv --proteins proteins.fasta --out DIR --weights ... --shard 3/20
"""

_EPILOG = """\
lists:
  Pairs are called P1_and_P2, and each comes once. pairs.csv has the columns chain_1, chain_2 (and so on), with names of
  records of --proteins; without --proteins they hold sequences, and a column id names the complex. --msa-dir finds the
  alignment of each protein under its own name; --db searches for each distinct chain once, while others are folded.

  Names take copies and parts as in AlphaPulldown: P1:2, P1:1-100, P1:2:1-100:150-200. With --proteins, a .txt file
  among the inputs has a complex per line (P1:2+P2:1-100), and .txt files of --baits, --candidates and --all-vs-all have
  a name per line. Residues keep the numbers of the full proteins.

DIR gets the files of fastfold infer, summary.tsv while targets are finished, and failures.tsv with the reason of each
target that failed. A target that ends its worker twice, or goes beyond a limit, is given up in this run.

exit code: 0 all targets folded or finished before; 1 at least one failed, or nothing could be done; 2 wrong use of
the command; 130 stopped by Ctrl-C.
"""


def add_screen_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    screen = commands.add_parser(
        "screen",
        help="fold thousands of targets with several workers",
        usage="fastfold screen [INPUT ...] --out DIR [--weights FILE ...] [options]",
        description=_SCREEN,
        epilog=_EPILOG,
    )
    add_inputs(screen, "FASTA, A3M or CSV files as for fastfold infer, or a table of partners")
    add_field_options({"": screen.add_argument_group("lists of proteins")}, TargetLists)
    workers = screen.add_argument_group("workers")
    add_field_options({"workers": workers, "shards": workers}, ScreenOptions)
    add_fold_options(screen, parallel=False)
    finish_command(screen, run_screen)


def run_screen(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    request = infer_request(options)
    where = from_options(ScreenOptions, options)
    announce(options)
    with imports_without_collection():
        from fastfold.inference.workers.run import screen
        from fastfold.products.screen.targets import screen_targets

    lists = from_options(TargetLists, options, {TargetLists: {"inputs": tuple(options.inputs)}})
    targets = partial(
        screen_targets,
        lists,
        complex_=request.options.complex_,
        allow_download=request.options.allow_download,
    )
    summary = screen(replace(request, inputs=targets), where)
    return print_summary(summary, request.output)
