"""Mol*, the viewer of the page, where the package that carries it is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "molstar-cli"
"""The package on PyPI whose files are taken."""


@dataclass(frozen=True)
class Molstar:
    """The viewer's files.

    Attributes:
        script: JavaScript.
        style: CSS.
        licence: The text of its licence, which has to go where the files go.
        version: Its version.
    """

    script: str
    style: str
    licence: str
    version: str


def load_molstar() -> Molstar | None:
    """Read the viewer's files; None if its package is not installed or does not have them."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "static" / "molstar"
    try:
        script, style, licence, version = (
            (folder / name).read_text("utf-8")
            for name in ("molstar.js", "molstar.css", "LICENSE.molstar", "VERSION")
        )
    except (OSError, UnicodeDecodeError):
        return None
    return Molstar(script, style, licence, version.strip())
