"""``fastfold cite``: print the papers to cite."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_cite_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    cite = commands.add_parser(
        "cite",
        help="print the papers to cite",
        description="Print the papers of the methods that FastFold uses, or those of the results in a folder.",
    )
    cite.add_argument(
        "directory", nargs="?", type=Path, metavar="DIR", help="folder of results (default: all papers)"
    )
    cite.add_argument("--bibtex", action="store_true", help="print BibTeX entries")
    cite.set_defaults(run=run_cite)


def run_cite(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code.

    Raises:
        InputError: The folder has no results.
    """
    from fastfold.protein.citations import CITATIONS, find_citations

    citations = list(CITATIONS)
    if options.directory is not None:
        from fastfold.inference.output.used_methods import used_methods

        citations = find_citations(used_methods(options.directory))
    texts = [one.bibtex() if options.bibtex else f"{one.use}:\n  {one.text()}" for one in citations]
    print("\n\n".join(texts))
    return 0
