"""Mol*, the viewer of the page, where the package that carries it is installed."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "molstar-cli"
"""The package on PyPI whose files are taken."""

SHA256 = {
    "molstar.js": "7fad5561c74bc900930fb57d6ab028d1aafdda82223a901bf932b1098e84f1f3",
    "molstar.css": "5b68ceb6d3642549b4e9b2c071e58e41b98a5350ae269180587b39da86925d55",
}
"""Sums of the files that go into pages, in the version that ``pyproject.toml`` pins."""


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
    """Read the viewer's files; None if its package is not installed or does not have them.

    Raises:
        ValueError: A file that would go into pages has another SHA-256 than the known one.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "static" / "molstar"
    names = ("molstar.js", "molstar.css", "LICENSE.molstar", "VERSION")
    try:
        contents = {name: (folder / name).read_bytes() for name in names}
    except OSError:
        return None
    for name, expected in SHA256.items():
        if (found := hashlib.sha256(contents[name]).hexdigest()) != expected:
            raise ValueError(
                f"{name} of the package {PACKAGE} has another SHA-256 than this version of FastFold knows: expected "
                f"{expected}, found {found}"
            )
    script, style, licence, version = (contents[name].decode("utf-8") for name in names)
    return Molstar(script, style, licence, version.strip())
