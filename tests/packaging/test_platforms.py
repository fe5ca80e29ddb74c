"""The table of platforms in ``docs/install.md`` is what a resolver finds, with wheels alone.

uv resolves for machines that are not there; it asks the package index.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import REPOSITORY
from tests.packaging.project import project_table

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_34",
    "Linux x86-64, glibc 2.28": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_34",
    "macOS 14, Apple silicon": "aarch64-apple-darwin",
    "macOS, Intel": "x86_64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
}
"""Rows of the table, and what uv calls them."""

PURE_SOURCES = {
    "antlr4-python3-runtime": "hydra-core",
    "ihm": "msgpack",
    "modelcif": "msgpack",
    "pdbfixer": "openmm",
}
"""Packages that the index has as a source that pip builds anywhere, and what goes with them."""

ON_SOME_SYSTEMS = {"psutil"}
"""Packages whose work another part of the system does where they are left out."""


def _table() -> dict[str, dict[str, str]]:
    """Read the table: what is installed, by platform and Python."""
    text = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    (header,) = [row for row in rows if row[1:] == [f"Python {python}" for python in PYTHONS]]
    found = rows[rows.index(header) + 2 :][: len(PLATFORMS)]
    return {row[0]: dict(zip(PYTHONS, row[1:], strict=True)) for row in found}


def resolve(platform: str, python: str, folder: Path) -> str:
    """Return what is installed on a platform, as the table says it; skips the test where uv has no index."""
    needed = [Requirement(line) for line in project_table()["dependencies"]]
    needed = [one for one in needed if one.name not in PURE_SOURCES]
    lines = [*map(str, needed), *PURE_SOURCES.values()]
    (folder / "requirements.in").write_text("\n".join(lines), encoding="utf-8")
    left_to_pip = [f"{name}; python_version < '3'" for name in PURE_SOURCES]
    (folder / "overrides.txt").write_text("\n".join(left_to_pip), encoding="utf-8")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", "--python-platform", PLATFORMS[platform]]
    command += ["--override", "overrides.txt", "--python-version", python, "requirements.in"]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if found.returncode:
        absent = re.search(r"Because (?:only |all versions of )?([a-z0-9-]+)", found.stderr)
        if "No solution found" not in found.stderr or absent is None:
            pytest.skip(f"uv cannot resolve here: {found.stderr.strip()[:300]}")
        return f"no: {absent[1]}"
    installed = {line.partition("==")[0] for line in found.stdout.splitlines()}
    left_out = [one.name for one in needed if one.name not in installed | ON_SOME_SYSTEMS]
    return f"all but {', '.join(sorted(left_out))}" if left_out else "all"


def test_the_table_has_every_platform_and_python() -> None:
    table = _table()
    assert list(table) == list(PLATFORMS)
    assert all(
        re.fullmatch(r"all|(all but|no:) [a-z, -]+", cell) for row in table.values() for cell in row.values()
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uv") is None, reason="needs uv: pip install uv")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_installs_what_the_table_says(platform: str, python: str, tmp_path: Path) -> None:
    assert resolve(platform, python, tmp_path) == _table()[platform][python]
