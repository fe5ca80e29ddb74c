"""``fastfold search``: search sequence databases for alignments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.data.search.settings import HmmerSettings, SearchSources, ServerAccess
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError
from fastfold.inference.command_line.fold_options import add_inputs, found_databases
from fastfold.inference.progress import print_line
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.command_line.help_all import finish_command
from fastfold.utils.option_fields import option

_SEARCH = """\
Search sequence databases for relatives of every chain of the inputs (FASTA, A3M, CSV, folders of these, or -), by
jackhmmer or phmmer with AlphaFold's settings, by MMseqs2 with ColabFold's, or by an MSA server, and write the folder of
alignments that fastfold infer --msa-dir reads:

  DIR/<id>/<name>_hits.sto     relatives in the database <name>, aligned to the chain
  DIR/<id>/A/<name>_hits.sto   the same of chain A of a complex
  DIR/<id>/colabfold_hits.a3m  by MMseqs2 or a server: a chain, or a complex with its chains paired
  DIR/<id>/search.json         databases and settings of the search

Chains with the same sequence are searched once, whatever their names, and chains with an alignment in DIR keep it.
Finished searches are not repeated, so run the same command again to continue.
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


@dataclass(frozen=True)
class SearchOptions:
    """Options of the command other than the sources of alignments."""

    out: Path = option(is_required=True, parse=Path, metavar="DIR", help="folder for the alignments")
    templates: bool = option(
        default=False, help="fetch the structures of the MSA server's template hits, too"
    )


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
    )
    add_inputs(search)
    groups = dict.fromkeys(
        ("sources", "pairs", "targets", "search alone", "hmmer", "search processes"), search
    )
    add_field_options(groups, SearchSources, ServerAccess, HmmerSettings, RunOptions)
    add_field_options({"": search}, SearchOptions)
    add_field_options({"output": search}, RunOptions, only=("quiet",))
    finish_command(search, run_search)


def run_search(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    if not options.inputs:
        raise ConfigError("no input given; put the inputs first, because every name after --db is a database")
    sources = from_options(SearchSources, options, found_databases(options, has_templates=False))
    chosen = from_options(SearchOptions, options)
    _check_sources(sources, templates=chosen.templates, pair_mode=options.pair_mode)
    templates = TemplateOptions(server=chosen.templates)
    own = {"msa_dir": chosen.out, "sources": sources, "templates": templates}
    run = from_options(RunOptions, options, {RunOptions: own})
    return search_alone(InferRequest(options.inputs, chosen.out, options=run), needed_alone=False)


def _check_sources(sources: SearchSources, *, templates: bool, pair_mode: str | None) -> None:
    """Refuse options without a search."""
    if sources.msa_mode == "single_sequence":
        raise ConfigError("--msa-mode single_sequence searches nothing; leave out fastfold search")
    if not sources.wanted:
        raise ConfigError(
            "say where to search: --db FASTA ..., --databases DIR, --engine mmseqs --db FOLDER, or --msa-server URL"
        )
    if sources.is_by_colabfold:
        return
    if pair_mode is not None:
        raise ConfigError(
            "--pair-mode chooses rows of whole complexes, which --msa-server and --engine mmseqs make; give it to "
            "fastfold infer instead"
        )
    if templates:
        raise ConfigError("--templates fetches the template hits of an MSA server: add --msa-server URL")


def search_alone(request: InferRequest, *, needed_alone: bool) -> int:
    """Search for a request's alignments and print the result; return the exit code, or raise FastFoldError.

    ``needed_alone`` is that of :meth:`fastfold.inference.alignment_search.AlignmentSearch.run`.
    """
    from fastfold.inference.alignment_search import AlignmentSearch

    search = AlignmentSearch.of(request)
    targets, errors = request.read_targets()
    for error in errors:
        print_line(f"error: {error}")
    if targets:
        targets, unfound = search.run(targets, needed_alone=needed_alone)
        for error in unfound:
            print_line(f"error: {error}")
        errors = [*errors, *unfound]
        plural = "" if len(targets) == 1 else "s"
        print(f"alignments of {len(targets)} target{plural} in {search.out}", flush=True)
    return 1 if errors else 0
