"""``fastfold search``: search sequence databases for alignments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastfold.cli.options.alignment_sources import (
    MMSEQS,
    add_source_options,
    add_worker_option,
    alignment_engines,
    find_databases_of,
)
from fastfold.cli.options.from_fields import whole_number
from fastfold.cli.options.help_all import finish_command, mark_rare
from fastfold.cli.process import orderly_termination
from fastfold.data.search.settings import HmmerSettings
from fastfold.errors import ConfigError
from fastfold.inference.request import InferRequest, RunOptions

if TYPE_CHECKING:
    from fastfold.inference.alignment_search import Engines

_SEARCH = """\
Search sequence databases for relatives of every chain of the inputs (FASTA, A3M, CSV, folders of these, or -), by
jackhmmer or phmmer with AlphaFold's settings, by MMseqs2 with ColabFold's, or by an MSA server, and write the folder of
alignments that fastfold infer --msa-dir reads:

  DIR/<id>/<name>_hits.sto     relatives in the database <name>, aligned to the chain
  DIR/<id>/A/<name>_hits.sto   the same of chain A of a complex
  DIR/<id>/colabfold_hits.a3m  by MMseqs2 or a server: a chain, or a complex with its chains paired
  DIR/<id>/search.json         databases and settings of the search

Chains with the same sequence are searched once, whatever their names. Finished searches are not repeated, so run the
same command again to continue.
"""

_SEARCH_EPILOG = """\
databases:
  FASTA files, plain or compressed (.gz). The name of a database decides how its hits are used; where the file's name
  does not tell, put it before the file: --db uniref90=/data/ur90.fa

    uniref90    at most 10,000 rows, first in order      (uniref90*.fasta)
    bfd         second, with small_bfd, uniref30         (bfd*.fasta; small_bfd is known by its file, too)
    mgnify      at most 501 rows, third                  (mgnify*, mgy_clusters*.fa)
    uniprot     pairs the chains of complexes by species and is used for nothing else (uniprot*.fasta)
    others      after these, by name

  BFD and UniRef30 in HH-suite's format are named by the beginning of their files' names: --db bfd/bfd_metaclust…
  uniref30/UniRef30_2021_03. They are searched together by hhblits, which has to be installed, with AlphaFold's flags.

  --engine mmseqs takes one folder with ColabFold's databases: uniref30_2302_db, and colabfold_envdb_202108_db if
  environmental sequences are to be searched. It needs MMseqs2 on PATH, or pip install 'fastfold[mmseqs]'.

MSA servers:
  --msa-server URL sends the sequences to a server that speaks ColabFold's protocol, whose owner can read and keep them.

examples:
  fastfold search proteins.fasta --db uniref90.fasta mgy_clusters_2022_05.fa --out alignments
  fastfold infer proteins.fasta --msa-dir alignments --out results

docs/search.md explains the settings, and the time and memory of a search.

exit code: 0 everything was found; 1 a record or a database could not be used; 2 wrong use of the command; 130 stopped
by Ctrl-C.
"""


def add_search_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    search = commands.add_parser(
        "search",
        help="search sequence databases for alignments",
        usage="fastfold search INPUT [INPUT ...] --db [NAME=]FASTA [...] --out DIR [options]\n"
        "       fastfold search INPUT [INPUT ...] --engine mmseqs --db FOLDER --out DIR [options]\n"
        "       fastfold search INPUT [INPUT ...] --msa-server URL --out DIR [options]",
        description=_SEARCH,
        epilog=_SEARCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    search.add_argument(
        "inputs",
        nargs="*",
        type=Path,
        metavar="INPUT",
        help="FASTA, A3M or CSV files (.gz too), folders, or -",
    )
    add_source_options(search)
    search.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the alignments")
    search.add_argument(
        "--templates", action="store_true", help="fetch the structures of the MSA server's template hits, too"
    )
    search.add_argument("--complex", action="store_true", help="all records of a file are one complex")
    search.add_argument(
        "--gpu", action="store_true", help="mmseqs: search on a GPU, in databases made for one"
    )
    search.add_argument(
        "-N",
        "--iterations",
        type=whole_number(1),
        default=HmmerSettings.iterations,
        metavar="N",
        help="maximum passes of jackhmmer; each searches with the hits that the last one included (default "
        f"{HmmerSettings.iterations})",
    )
    search.add_argument(
        "-E",
        "--e-value",
        type=float,
        default=HmmerSettings.e_value,
        metavar="X",
        help=f"largest E-value of a hit (default {HmmerSettings.e_value:g})",
    )
    search.add_argument(
        "--incE",
        "--include-e-value",
        dest="include_e_value",
        type=float,
        default=HmmerSettings.include_e_value,
        metavar="X",
        help=f"largest E-value of a hit that is aligned (default {HmmerSettings.include_e_value:g})",
    )
    for number, name in enumerate(("msv_filter", "viterbi_filter", "forward_filter"), 1):
        default = getattr(HmmerSettings, name)
        action = search.add_argument(
            f"--F{number}",
            dest=name,
            type=float,
            default=default,
            metavar="X",
            help=f"share of unrelated sequences that passes HMMER's filter {number} (default {default:g})",
        )
        mark_rare(action)
    search.add_argument(
        "--format",
        dest="file_format",
        choices=("sto", "a3m"),
        default=HmmerSettings.file_format,
        help=f"Stockholm or A3M (default {HmmerSettings.file_format})",
    )
    add_worker_option(search)
    search.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of all search processes together, 16GiB for example; the part of a database that does not fit is "
        "read repeatedly (default: half of the free memory)",
    )
    search.add_argument("--quiet", action="store_true", help="print only warnings and errors")
    finish_command(search, run_search)


def run_search(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code.

    Raises:
        FastFoldError: Nothing can be searched, or a result cannot be written.
    """
    find_databases_of(options)
    if not options.inputs:
        raise ConfigError("no input given; put the inputs first, because every name after --db is a database")
    run = RunOptions(
        msa_dir=options.out, engines=_engines(options), complex_=options.complex, quiet=options.quiet
    )
    return search_alone(InferRequest(options.inputs, options.out, options=run), needed_alone=False)


def _engines(options: argparse.Namespace) -> Engines:
    """Return the engines of the options."""
    if options.msa_server is None and not options.db:
        raise ConfigError(
            "say where to search: --db FASTA ..., --databases DIR, --engine mmseqs --db FOLDER, or --msa-server URL"
        )
    if options.msa_mode == "single_sequence":
        raise ConfigError("--msa-mode single_sequence searches nothing; leave out fastfold search")
    if options.pair_mode is not None and options.msa_server is None and options.engine != MMSEQS:
        raise ConfigError(
            "--pair-mode chooses rows of whole complexes, which --msa-server and --engine mmseqs make; give it to "
            "fastfold infer instead"
        )
    if options.gpu and options.engine != MMSEQS:
        raise ConfigError(f"--gpu needs --engine {MMSEQS}")
    return alignment_engines(options)


def search_alone(request: InferRequest, *, needed_alone: bool) -> int:
    """Search for the alignments of a request's targets, and print the result; return the exit code.

    Args:
        request: The request.
        needed_alone: See :func:`fastfold.inference.alignment_search.search_targets`.

    Raises:
        FastFoldError: Nothing can be searched, or a result cannot be written.
    """
    from fastfold.inference.alignment_search import search_targets

    options, out = request.options, request.msa_dir
    targets, errors = request.read_targets()
    for error in errors:
        print(f"error: {error}", file=sys.stderr, flush=True)
    if targets:
        with orderly_termination():
            found = search_targets(
                targets, options.engines, out, quiet=options.quiet, needed_alone=needed_alone
            )
        targets, unfound = found.left(targets)
        for error in unfound:
            print(f"error: {error}", file=sys.stderr, flush=True)
        errors = [*errors, *unfound]
        plural = "" if len(targets) == 1 else "s"
        print(f"alignments of {len(targets)} target{plural} in {out}", flush=True)
    return 1 if errors else 0
