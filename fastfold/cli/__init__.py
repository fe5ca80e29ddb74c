"""The ``fastfold`` command."""

from fastfold.cli.command import main

__all__ = ["main"]
