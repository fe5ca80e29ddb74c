"""Rarely used options, which ``--help`` leaves out and ``--help-all`` lists."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fastfold.utils.command_line.config_file import add_config_options


def mark_rare(action: argparse.Action) -> None:
    """Mark an option as rarely used."""
    action.is_rare = True  # type: ignore[attr-defined]


def is_rare(action: argparse.Action) -> bool:
    """Return True if an option is rarely used."""
    return getattr(action, "is_rare", False)


class HelpAll(argparse.Action):
    """Option that prints the help with all options."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> NoReturn:
        """Print the help and exit."""
        parser.has_full_help = True  # type: ignore[attr-defined]
        parser.print_help()
        parser.exit()


def finish_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], **defaults: Any
) -> None:
    """Add the options of files and of help to a command, and set its function, which returns the exit code.

    ``defaults`` are values of options that the command lacks.
    """
    add_config_options(parser)
    hidden: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options", **hidden)
    parser.set_defaults(run=run, **defaults)


@contextmanager
def without_rare(actions: list[argparse.Action]) -> Iterator[None]:
    """Leave rarely used options out of the help for a while."""
    helps = {action: action.help for action in actions if is_rare(action)}
    for action in helps:
        action.help = argparse.SUPPRESS
    try:
        yield
    finally:
        for action, text in helps.items():
            action.help = text
