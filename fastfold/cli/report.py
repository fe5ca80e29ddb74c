"""``fastfold report``: rebuild the page of a folder of results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_report_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    parser = commands.add_parser(
        "report",
        help="make the page of a folder of results",
        description="Make report.html of a folder that fastfold infer wrote to: one file to open in a browser, without "
        "a network. The 3D view is Mol*, from the package molstar-cli (pip install molstar-cli).",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of results")
    parser.add_argument("--table", action="store_true", help="also print summary.tsv as a table")
    parser.set_defaults(run=run_report)


def run_report(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code.

    Raises:
        FastFoldError: The folder has no results, or the page cannot be written.
    """
    from fastfold.inference.output.summary import aligned_table, read_summary
    from fastfold.inference.report import write_report

    if options.table and (lines := read_summary(options.directory / "summary.tsv")):
        shown = [
            column for column in lines[0] if column != "files" and any(line.get(column) for line in lines)
        ]
        print(aligned_table(lines, shown))
    print(f"wrote {write_report(options.directory, say=_warn)}")
    return 0


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)
