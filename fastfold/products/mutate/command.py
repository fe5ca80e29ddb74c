"""``fastfold mutate``: fold mutants of a target, and compare them with the wild type."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fastfold.errors import ConfigError
from fastfold.inference.command_line.fold_options import add_fold_options, add_inputs, infer_request
from fastfold.inference.command_line.printing import print_summary
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.command_line.help_all import finish_command
from fastfold.utils.option_fields import option

_MUTATE = """\
Fold a target and its mutants, and write how much each mutant differs from the wild type. All mutants share one
alignment, in which the query's row alone changes, and the templates of the wild type.

  fastfold mutate protein.fasta --mutations all --positions 10-30 --out DIR --weights monomer_ptm --msa-dir alignments
  fastfold mutate protein.fasta --mutations mutants.txt --out DIR --weights model_1_ptm --num-seeds 3
  fastfold mutate complex.fasta --mutations B:A24G,B:A24G+B:K30R --out DIR --weights multimer

A file has a mutant per line: A24G, A24G+K30R, in a complex B:A24G. On the command line commas separate mutants, in a
line of a file they join mutations. Copies of a chain are mutated together unless the chain is named. DIR gets
mutations.tsv with differences of pLDDT, aligned error and pTM and the effective strain, mutations.png with heat maps of
single mutants, and the files of fastfold infer. Run the same command again to continue.
"""

_EPILOG = """\
exit code: 0 all folded or finished before; 1 at least one failed, or nothing could be done; 2 wrong use of the command;
130 stopped by Ctrl-C.
"""


@dataclass(frozen=True)
class MutateOptions:
    """Options of the command other than those of all commands that fold."""

    mutations: str = option(
        is_required=True,
        metavar="FILE|all",
        help="file with a mutant per line, all for every substitution, or mutants such as A24G,A24G+K30R",
    )
    positions: str | None = option(
        default=None, metavar="LIST", help="with --mutations all: residues such as 5-20,B:3 (default: all)"
    )


def add_mutate_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    mutate = commands.add_parser(
        "mutate",
        help="fold mutants and compare them",
        usage="fastfold mutate TARGET --mutations FILE|all --out DIR [--weights FILE ...] [options]",
        description=_MUTATE,
        epilog=_EPILOG,
    )
    add_inputs(mutate, "file with one target, as for fastfold infer", metavar="TARGET")
    add_field_options({"": mutate}, MutateOptions)
    add_fold_options(mutate)
    finish_command(mutate, run_mutate)


def run_mutate(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    request = infer_request(options)
    if not request.inputs:
        raise ConfigError("no target given; fastfold mutate TARGET --mutations FILE --out DIR")

    from fastfold.products.mutate.run import run_mutations
    from fastfold.products.mutate.table import TABLE

    chosen = from_options(MutateOptions, options)
    summary = run_mutations(request, mutations=chosen.mutations, positions=chosen.positions)
    return print_summary(summary, request.output, table=TABLE)
