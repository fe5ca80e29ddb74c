"""``fastfold ensemble``: analyse the predictions of a target as an ensemble."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.inference.progress import print_line
from fastfold.inference.sampling.settings import SIMILARITY
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.option_fields import LARGEST, argument, option
from fastfold.utils.units import parse_number

_DESCRIPTION = """\
Compare all predictions of each target in a folder of results, of fastfold infer --sample for example. DIR gets

  <id>_ensemble.tsv               a line per sample: cluster, principal components, agreement with --reference
  <id>_ensemble_residues.tsv      fluctuation (RMSF) and mean pLDDT of each residue
  <id>_ensemble.json              all numbers, with TM-score and RMSD of all pairs
  <id>_ensemble.pdb               representatives of the clusters as models, superposed on the mean
  <id>_ensemble_*.png             pairs, landscape, fluctuations, states

and report.html shows them.
"""


@dataclass(frozen=True)
class EnsembleOptions:
    """Options of a comparison of samples."""

    directory: Path = argument(parse=Path, metavar="DIR", help="folder of results")
    target: str | None = option(default=None, metavar="NAME", help="analyse this target only (default: all)")
    reference: Sequence[Path] = option(
        default=(),
        nargs="+",
        parse=Path,
        metavar="FILE",
        help="structures of known states (PDB or mmCIF): TM-score and RMSD of each sample",
    )
    similarity: float = option(
        default=SIMILARITY,
        parse=parse_number,
        metavar="X",
        help=f"join clusters while the mean TM-score of their pairs is at least this (default {SIMILARITY})",
    )
    clusters: int | None = option(
        default=None, bounds=(1, LARGEST), help="make N clusters instead of --similarity"
    )
    min_plddt: float = option(
        default=0.0, parse=parse_number, metavar="X", help="leave out samples of lower mean pLDDT (default 0)"
    )
    plots: bool = option("--no-plots", default=True, help="draw no pictures")


def add_ensemble_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    parser = commands.add_parser("ensemble", help="compare the samples of a target", description=_DESCRIPTION)
    add_field_options({"": parser}, EnsembleOptions)
    parser.set_defaults(run=run_ensemble)


def run_ensemble(namespace: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    from fastfold.inference.report import write_report
    from fastfold.products.ensemble.write import write_ensembles

    options = from_options(EnsembleOptions, namespace)
    write_ensembles(
        options.directory,
        target=options.target,
        references=options.reference,
        similarity=options.similarity,
        num_clusters=options.clusters,
        min_plddt=options.min_plddt,
        plots=options.plots,
        say=print,
    )
    page = write_report(options.directory, say=lambda line: print_line(f"warning: {line}"))
    print(f"wrote {page}")
    return 0
