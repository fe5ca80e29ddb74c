"""``fastfold score``: score given structures and complexes by a network."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fastfold.errors import ConfigError
from fastfold.inference.command_line.fold_options import add_fold_options, add_inputs, infer_request
from fastfold.inference.command_line.printing import print_summary
from fastfold.inference.workers.options import ScreenOptions
from fastfold.utils.command_line.from_fields import add_field_options, field_values, from_options
from fastfold.utils.command_line.help_all import finish_command
from fastfold.utils.option_fields import option

_SCORE = """\
Score structures (PDB, mmCIF, .gz, folders) by a network: decoys, models of other programs, designs, complexes.

  fastfold score decoys/ --out DIR --weights model_1_ptm
  fastfold score designs/*.pdb --initial-guess --show-target --out DIR --weights model_1_ptm --num-recycles 3

By default each structure is shown as a template without its sequence and side chains, as AF2Rank does, and the network
sees no alignment. The composite score is pLDDT x pTM x TM-score between structure and prediction. With --initial-guess
the structure's atoms are the recycled positions of the first pass, which suits every network, and designs.

DIR gets scores.tsv, the structures sorted by their composite score, interfaces.csv with the scores of all pairs of
chains, and the files of fastfold infer. Run the same command again to continue.
"""

_EPILOG = """\
weights:
  The template needs a network that takes templates and predicts a TM-score: model_1_ptm, model_2_ptm, or a multimer
  network. mini takes no templates; it can score with --initial-guess.

exit code: 0 all structures scored or finished before; 1 at least one failed, or nothing could be done; 2 wrong use of
the command; 130 stopped by Ctrl-C.
"""


@dataclass(frozen=True)
class ScoreOptions:
    """Options of the command other than those of all commands that fold."""

    by_initial_guess: bool = option(
        "--initial-guess",
        default=False,
        dest="by_initial_guess",
        help="start from the structure's atoms, as if they were recycled, instead of showing a template",
    )
    show_target: bool = option(
        default=False,
        help="with --initial-guess: show all chains but the first, the binder, as a template with side chains",
    )


def add_score_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    score = commands.add_parser(
        "score",
        help="score given structures",
        usage="fastfold score FILE [FILE ...] --out DIR [--weights FILE ...] [options]",
        description=_SCORE,
        epilog=_EPILOG,
        conflict_handler="resolve",  # --initial-guess takes no file here
    )
    add_inputs(score, "PDB or mmCIF files (.gz too), or folders of them", metavar="FILE")
    workers = score.add_argument_group("workers")
    add_field_options({"workers": workers, "shards": workers}, ScreenOptions)
    add_fold_options(score)
    add_field_options({"": score.add_argument_group("protocol")}, ScoreOptions)
    finish_command(score, run_score)


def run_score(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    if not options.inputs:
        raise ConfigError("no structure given; fastfold score FILE ... --out DIR, with the files first")
    request = infer_request(options)

    from fastfold.products.score.run import TABLE, Protocol, run_scores

    chosen = from_options(ScoreOptions, options)
    protocol = Protocol("initial_guess" if chosen.by_initial_guess else "template", chosen.show_target)
    settings = field_values(options, ScreenOptions)
    workers = ScreenOptions(**settings) if settings else None
    summary = run_scores(options.inputs, request, protocol=protocol, workers=workers)
    return print_summary(summary, request.output, done="scored", table=TABLE)
