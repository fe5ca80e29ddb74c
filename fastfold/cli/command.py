"""The ``fastfold`` command. Imports stay inside the commands, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import contextlib
import errno
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fastfold._version import __version__
from fastfold.cli.commands.completion import add_completion_command
from fastfold.cli.hints import CommandParser
from fastfold.cli.process import (
    Termination,
    exit_with,
    open_standard_streams,
    orderly_termination,
    prepare_environment,
)
from fastfold.errors import ConfigError, FastFoldError, as_option, settings_spelled
from fastfold.inference.command_line.printing import silence_stdout
from fastfold.inference.error_messages import debugging, internal_error
from fastfold.inference.progress import wrapped

_EPILOG = """\
examples:
  fastfold weights download monomer_ptm multimer
  fastfold infer protein.fasta --out results --weights monomer_ptm
  fastfold infer *.fasta --out results --weights params_model_*_ptm.npz --msa-dir alignments
  fastfold infer protein.fasta --out results --db uniref90.fasta
  fastfold databases download uniref90 mgnify small_bfd --dir /data/alphafold
  fastfold infer protein.fasta --out results --weights multimer --databases /data/alphafold
  fastfold search *.fasta --db uniref90.fasta mgnify.fasta --out alignments
  fastfold infer complex.fasta --out results --weights multimer --complex
  fastfold screen --baits bait.fasta --candidates all.fasta --out results --weights params_model_*_multimer_v3.npz
  fastfold score decoys/ --out scores --weights model_1_ptm
  fastfold mutate protein.fasta --mutations all --positions 10-30 --out mutants --weights monomer_ptm
  fastfold design hallucinate --length 60 --out designs
  fastfold serve --data /data/fastfold --weights monomer_ptm
  fastfold submit protein.fasta --out results
  fastfold relax results/*_rank_001_*.pdb --out relaxed
  fastfold weights info params_model_1_ptm.npz
"""

_CONTINUE = "finished results are kept, run the same command to continue"


def console() -> NoReturn:
    """Run the command line of this process and end it.

    Example:
        >>> import subprocess, sys
        >>> code = "import sys; sys.argv[1:] = ['--version']; from fastfold.cli import console; console()"
        >>> subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        'fastfold ...'
    """
    exit_with(main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 2 for wrong use, 1 for another error.

    Errors that a user can cause are printed as one message, without a traceback.

    Example:
        >>> from fastfold.cli import main
        >>> main(["cite", "no_such_folder"])
        1
    """
    open_standard_streams()
    with settings_spelled(as_option):
        return _code(arguments)


def _code(arguments: Sequence[str] | None) -> int:
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _fail(str(error), 2)
    except FastFoldError as error:
        return _fail(str(error), 1)
    except Termination as error:
        return _fail(f"stopped by {error}; {_CONTINUE}", error.code)
    except KeyboardInterrupt:
        return _fail(f"stopped; {_CONTINUE}", 130)
    except BrokenPipeError:
        silence_stdout()
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL and (problem := _stdout_problem()):
            return _fail(problem, 1)
        if debugging():
            raise
        return _fail(internal_error(error), 1)


def _run(arguments: Sequence[str]) -> int:
    parser = _parser(*arguments[:1])
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    prepare_environment()
    run: Callable[[argparse.Namespace], int] = options.run
    with orderly_termination():
        return run(options)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a standard output that takes no line."""


def _stdout_problem() -> str:
    """Return a message if the standard output takes no line, as on a full disk; empty if it takes one."""
    try:
        print(flush=True)
    except OSError as error:
        silence_stdout()
        return f"cannot write to the standard output: {error.strerror}; print to another place"
    return ""


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(wrapped(f"fastfold: {message}", sys.stderr), file=sys.stderr)
    return code


COMMANDS = {
    "infer": "fastfold.cli.commands.infer",
    "ensemble": "fastfold.products.ensemble.command",
    "embed": "fastfold.products.embed.command",
    "screen": "fastfold.products.screen.command",
    "score": "fastfold.products.score.command",
    "mutate": "fastfold.products.mutate.command",
    "design": "fastfold.products.design.command",
    "search": "fastfold.cli.commands.resources.search",
    "serve": "fastfold.products.serve.commands.serve",
    "submit": "fastfold.products.serve.commands.submit",
    "train": "fastfold.cli.commands.train",
    "data": "fastfold.cli.commands.train",
    "relax": "fastfold.cli.commands.relax",
    "plan": "fastfold.cli.commands.plan",
    "report": "fastfold.cli.commands.report",
    "verify": "fastfold.products.verify.command",
    "environment": "fastfold.products.verify.command",
    "weights": "fastfold.cli.commands.resources.weights",
    "databases": "fastfold.cli.commands.resources.databases",
    "cite": "fastfold.cli.commands.report",
}
"""Modules of the commands, in the order of the help; each has a function ``add_<name>_command``.

A command is left out if its product's folder is absent."""


def _commands() -> list[str]:
    """Return the names of the commands whose modules are there."""
    folder = Path(__file__).parents[2]
    return [
        name for name, module in COMMANDS.items() if (folder / f"{module.replace('.', '/')}.py").is_file()
    ]


def _parser(called: str = "") -> argparse.ArgumentParser:
    """Return the parser of one command, or of all commands where that one needs the others or is none."""
    parser = CommandParser(
        prog="fastfold",
        description="Protein structure prediction with the AlphaFold 2 networks.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"fastfold {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    names = _commands()
    for name in [called] if called in names else names:
        pkgutil.resolve_name(f"{COMMANDS[name]}:add_{name}_command")(commands)
    if called not in names:
        add_completion_command(commands, parser)
    return parser
