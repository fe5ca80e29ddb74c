"""The ``fastfold`` command."""

from fastfold.cli.command import console, main

__all__ = ["console", "main"]
