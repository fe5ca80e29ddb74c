"""``fastfold report`` and ``fastfold cite``: page and citations of a folder of results."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.inference.progress import print_line
from fastfold.protein.metrics.scores import LARGEST_OF_PAIRS, PAIR_SCORES
from fastfold.utils.command_line.from_fields import add_field_options, from_options
from fastfold.utils.option_fields import argument, option

_SCORES = (
    *(one.name for one in PAIR_SCORES),
    "mean_plddt",
    "ptm",
    "iptm",
    "ranking_confidence",
    *LARGEST_OF_PAIRS,
)
_COLUMNS = f"target partner_1 partner_2 chain_1 chain_2 rank model seed {' '.join(_SCORES)} clashes files"
_EPILOG = f"""\
columns of --where and --sort:
{textwrap.fill(_COLUMNS, 120, initial_indent="  ", subsequent_indent="  ")}

examples:
  fastfold report results --where "ipsae_max>0.5 and rank==1"
  fastfold report results --where "'P04637' in partner_1" --sort pdockq2 --export hits.csv hits.parquet
"""
_LISTED = ("partner_1", "partner_2", "rank", "ipsae", "pdockq2", "lis", "pair_iptm", "interface_pae", "files")
_MOST_LISTED = 50


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report."""

    directory: Path = argument(parse=Path, metavar="DIR", help="folder of results")
    reference: Path | None = option(
        default=None,
        parse=Path,
        metavar="PATH",
        help="experimental structure to compare with, or a folder of files named like the targets",
    )
    table: bool = option(default=False, help="also print summary.tsv as a table")
    condition: str | None = option(
        "--where",
        default=None,
        metavar="CONDITION",
        help='keep pairs of chains that meet a condition, such as "ipsae_max>0.5 and rank==1", on the page and in the '
        "files of --export, and print them",
    )
    sort: str = option(
        default="ipsae",
        metavar="COLUMN",
        help="column that orders the list and the files, largest first (default ipsae)",
    )
    export: Sequence[Path] = option(
        default=(),
        nargs="+",
        parse=Path,
        metavar="FILE",
        help="write the table of interfaces: .csv, .tsv, or .parquet (needs pyarrow)",
    )


def add_report_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    parser = commands.add_parser(
        "report",
        help="make the page of a folder of results",
        description="Make report.html of a folder that fastfold infer or fastfold screen wrote to: one file to open in "
        "a browser, without a network. Of complexes, interfaces.csv has the scores of all pairs of chains, best first.",
        epilog=_EPILOG,
    )
    add_field_options({"": parser}, ReportOptions)
    parser.set_defaults(run=run_report)


def run_report(namespace: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    from fastfold.inference.output.summary import aligned_table, read_table
    from fastfold.inference.report import write_report
    from fastfold.inference.report.interfaces import (
        COLUMNS,
        check_export,
        find_rows,
        parse_condition,
        sort_rows,
        write_rows,
    )

    options = from_options(ReportOptions, namespace)
    if options.reference is not None:
        from fastfold.inference.report.references import compare_results

        compare_results(options.directory, options.reference, print)
    meets = None if options.condition is None else parse_condition(options.condition, COLUMNS)
    sort_rows((), options.sort)
    for path in options.export:
        check_export(path)
    if options.table and (lines := read_table(options.directory / "summary.tsv")):
        filled = [column for column in lines[0] if any(line.get(column) for line in lines)]
        print(aligned_table(lines, [column for column in filled if column != "files"]))
    if meets is not None or options.export:
        every = find_rows(options.directory)
        rows = sort_rows(every if meets is None else list(filter(meets, every)), options.sort)
        if meets is not None:
            shown_rows = [{key: _cell(row[key]) for key in _LISTED} for row in rows[:_MOST_LISTED]]
            if shown_rows:
                print(aligned_table(shown_rows, _LISTED))
            print(f"{len(rows):,} of {len(every):,} pairs of chains meet the condition")
        for path in options.export:
            write_rows(rows, path)
            print(f"wrote {path}")
        if meets is not None and not rows:
            return 0
    page = write_report(options.directory, say=lambda line: print_line(f"warning: {line}"), where=meets)
    print(f"wrote {page}")
    return 0


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class CiteOptions:
    """Options of a list of papers."""

    directory: Path | None = argument(
        default=None, nargs="?", parse=Path, metavar="DIR", help="folder of results (default: all papers)"
    )
    bibtex: bool = option(default=False, help="print BibTeX entries")


def add_cite_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    cite = commands.add_parser(
        "cite",
        help="print the papers to cite",
        description="Print the papers of the methods that FastFold uses, or those of the results in a folder.",
    )
    add_field_options({"": cite}, CiteOptions)
    cite.set_defaults(run=run_cite)


def run_cite(namespace: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise InputError."""
    from fastfold.protein.citations import CITATIONS, find_citations

    options = from_options(CiteOptions, namespace)
    citations = list(CITATIONS)
    if options.directory is not None:
        from fastfold.inference.output.used_methods import used_methods

        citations = find_citations(used_methods(options.directory))
    texts = [one.bibtex() if options.bibtex else f"{one.use}:\n  {one.text()}" for one in citations]
    print("\n\n".join(texts))
    return 0
