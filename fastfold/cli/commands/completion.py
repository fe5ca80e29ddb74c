"""``fastfold completion``: a script by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.errors import ConfigError
from fastfold.utils.command_line.from_fields import add_field_options
from fastfold.utils.option_fields import argument

_COMPLETION = """\
Print a script that completes commands, options and file names:

  eval "$(fastfold completion bash)"          # in ~/.bashrc
  eval "$(fastfold completion zsh)"           # in ~/.zshrc, after compinit
  fastfold completion tcsh > ~/.fastfold.csh  # source it in ~/.tcshrc
"""


@dataclass(frozen=True)
class CompletionOptions:
    """Shell that completes."""

    shell: str = argument(choices=("bash", "zsh", "tcsh"), help=None)


def add_completion_command(commands: Any, root: argparse.ArgumentParser) -> None:
    """Add the subcommand to the subparsers of ``root``, the ``fastfold`` parser."""
    completion = commands.add_parser(
        "completion", help="print a script for tab completion", description=_COMPLETION
    )
    add_field_options({"": completion}, CompletionOptions)
    completion.set_defaults(run=lambda options: run_completion(root, options.shell))


def run_completion(root: argparse.ArgumentParser, shell: str) -> int:
    """Print the script; return the exit code, or raise ConfigError."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("tab completion needs the package shtab: pip install shtab") from error
    _complete_files(root, shtab.FILE)
    print(shtab.complete(root, shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Mark every argument that is a path, also of subcommands."""
    for action in parser._actions:
        if action.type is Path:
            action.complete = files  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
