"""``fastfold serve``: fold for several users over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from fastfold.inference.config import InferConfig
from fastfold.inference.progress import print_line
from fastfold.inference.request import InferRequest
from fastfold.inference.workers.options import ScreenOptions
from fastfold.products.serve.options import ServeOptions
from fastfold.utils.command_line.from_fields import add_field_options, field_values, from_options

_SERVE = """\
Fold for a lab over HTTP: submit, poll, stream progress, fetch files, open the page of results. Jobs are kept in a queue
on the disk and answered once, whatever ends the server. 'fastfold submit' and fastfold.products.serve.Client talk to
it; /openapi.json describes it.

  fastfold serve --data DIR --weights monomer_ptm multimer
  fastfold serve --data DIR --host 0.0.0.0 --tokens tokens.txt --weights monomer_ptm
"""

_EPILOG = """\
access:
  Without --tokens only programs of this machine are served. tokens.txt has a line USER TOKEN for each user (or USER
  sha256:HEX, the hash of the token), and must not be readable for all. The server speaks HTTP: TLS is the part of a
  proxy in front of it (nginx, Caddy), because a token that is sent without TLS can be read on its way.

order:
  Jobs of higher priority start first, those of equal priority in the order of admission. Jobs with equal settings whose
  lengths differ by at most a quarter join the first one, up to --group; --group 1 keeps the strict order.

workers:
  The machines of a Ray cluster (--ray) need the folder --data, too.
"""


def add_serve_command(commands: Any) -> None:
    """Add the subcommand to the ``fastfold`` parser's subparsers."""
    serve = commands.add_parser(
        "serve",
        help="fold for several users over HTTP",
        usage="fastfold serve --data DIR [--weights FILE ...] [options]",
        description=_SERVE,
        epilog=_EPILOG,
    )
    add_field_options(dict.fromkeys(("data", "weights"), serve), ServeOptions, InferRequest)
    groups = {name: serve.add_argument_group(name) for name in ("access", "limits", "workers", "machine")}
    add_field_options(groups, ServeOptions, ScreenOptions)
    machine = groups["machine"]
    of_fold = dict.fromkeys(("machine", "sampling", "memory"), machine)
    add_field_options(of_fold, InferConfig, only=("device", "precision", "memory_budget"))
    add_field_options({"messages": machine}, ServeOptions)
    serve.set_defaults(run=run_serve)


def run_serve(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code, or raise FastFoldError."""
    from fastfold.utils.packages import require_package

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require_package(package, "fastfold serve")
    served = from_options(ServeOptions, options)
    from fastfold.products.serve.server import serve

    def say(line: str) -> None:
        print_line(line, quiet=served.quiet and not line.startswith("error"))

    settings = field_values(options, InferRequest) | {"config": from_options(InferConfig, options)}
    serve(served, InferRequest((), served.data, **settings), from_options(ScreenOptions, options), say)
    return 0
