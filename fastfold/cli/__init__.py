"""The ``fastfold`` command."""

from fastfold.cli.main import main

__all__ = ["main"]
