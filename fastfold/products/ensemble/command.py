"""``fastfold ensemble``: analyse the predictions of a target as an ensemble."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fastfold.inference.command_line.printing import print_line
from fastfold.inference.sampling.settings import SIMILARITY
from fastfold.utils.command_line.from_fields import whole_number

_DESCRIPTION = """\
Compare all predictions of each target in a folder of results, of fastfold infer --sample for example. DIR gets

  <id>_ensemble.tsv               a line per sample: cluster, principal components, agreement with --reference
  <id>_ensemble_residues.tsv      fluctuation (RMSF) and mean pLDDT of each residue
  <id>_ensemble.json              all numbers, with TM-score and RMSD of all pairs
  <id>_ensemble.pdb               representatives of the clusters as models, superposed on the mean
  <id>_ensemble_*.png             pairs, landscape, fluctuations, states

and report.html shows them.
"""


def add_ensemble_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    parser = commands.add_parser(
        "ensemble",
        help="compare the samples of a target",
        description=_DESCRIPTION,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of results")
    parser.add_argument("--target", metavar="NAME", help="analyse this target only (default: all)")
    parser.add_argument(
        "--reference",
        type=Path,
        nargs="+",
        action="extend",
        metavar="FILE",
        default=[],
        help="structures of known states (PDB or mmCIF): TM-score and RMSD of each sample",
    )
    parser.add_argument(
        "--similarity",
        type=float,
        default=SIMILARITY,
        metavar="X",
        help=f"join clusters while the mean TM-score of their pairs is at least this (default {SIMILARITY})",
    )
    parser.add_argument(
        "--clusters", type=whole_number(1), metavar="N", help="make N clusters instead of --similarity"
    )
    parser.add_argument(
        "--min-plddt",
        type=float,
        default=0.0,
        metavar="X",
        help="leave out samples of lower mean pLDDT (default 0)",
    )
    parser.add_argument("--no-plots", action="store_true", help="draw no pictures")
    parser.set_defaults(run=run_ensemble)


def run_ensemble(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    from fastfold.inference.report import write_report
    from fastfold.products.ensemble.write import write_ensembles

    write_ensembles(
        options.directory,
        target=options.target,
        references=options.reference,
        similarity=options.similarity,
        num_clusters=options.clusters,
        min_plddt=options.min_plddt,
        plots=not options.no_plots,
        say=print,
    )
    page = write_report(options.directory, say=lambda line: print_line(f"warning: {line}"))
    print(f"wrote {page}")
    return 0
