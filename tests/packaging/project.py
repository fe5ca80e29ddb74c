"""The project's own declarations: ``pyproject.toml`` and ``constraints.txt``."""

from __future__ import annotations

import sys
from typing import Any

from tests.conftest import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest requires it there
    import tomli as tomllib


def project_table() -> dict[str, Any]:
    """Return the table ``project`` of ``pyproject.toml``."""
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]


def constraints() -> list[str]:
    """Return the lines of ``constraints.txt`` that pin a package."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
