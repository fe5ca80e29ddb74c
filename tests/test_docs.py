"""What the documentation names is there: files, links, modules, functions, and variables of the environment."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").glob("*.md"),
        REPOSITORY / "examples" / "README.md",
        REPOSITORY / "benchmarks" / "README.md",
    ]
)
NEW = "silu_gate"  # what a recipe of CONTRIBUTING.md adds

each_page = pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(REPOSITORY))) for page in PAGES]
)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    """Files and folders beside the page; addresses on the web are not asked."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if target and not (page.parent / target).exists()] == []


@each_page
def test_paths_exist(page: Path) -> None:
    """Everything in backquotes that looks like a path of the repository; ``<...>`` stands for any name."""
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:fastfold|tests|docs|examples|benchmarks)/[^`\s]*)[^`]*`", text)
    patterns = {re.sub(r"<[^>]*>", "*", path).rstrip("/") for path in paths if NEW not in path}
    assert sorted(pattern for pattern in patterns if not any(REPOSITORY.glob(pattern))) == []


@each_page
def test_names_exist(page: Path) -> None:
    """Every dotted name of the package is a module, or something in one."""
    names = set(re.findall(r"\bfastfold(?:\.[A-Za-z_]\w*)+", page.read_text(encoding="utf-8")))
    assert sorted(name for name in names if NEW not in name and not _is_there(name)) == []


def test_the_reference_has_all_public_names_and_no_others() -> None:
    """Sphinx warns of a missing name, after minutes."""
    lines = (REPOSITORY / "docs" / "reference.rst").read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.startswith("   fastfold.")]
    assert [name for name in names if not _is_there(name)] == []
    assert len(set(names)) == len(names)
    public = {f"fastfold.{name}" for name in importlib.import_module("fastfold").__all__}
    assert public - set(names) == {"fastfold.__version__"}


def _is_there(name: str) -> bool:
    try:
        _object(name)
    except (ImportError, AttributeError):
        return False
    return True


def _object(name: str) -> Any:
    """The module of a dotted name, or what a module calls so."""
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, _, attribute = name.rpartition(".")
        if not owner:
            raise
        return getattr(_object(owner), attribute)


def test_every_variable_of_the_environment_is_documented() -> None:
    text = (REPOSITORY / "docs" / "environment_variables.md").read_text(encoding="utf-8")
    read = set()
    for path in (REPOSITORY / "fastfold").rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        if "environ" not in code and "getenv" not in code:
            continue
        read |= set(
            re.findall(r"(?:environ(?:\.get|\.setdefault)?[\[(]|getenv\(|VARIABLE = )\"([A-Z_]+)\"", code)
        )
        read |= set(re.findall(r"\"([A-Z_]+)\" (?:not )?in os\.environ", code))
    assert {"FASTFOLD_KERNELS", "FASTFOLD_DEBUG", "WORLD_SIZE"} <= read
    assert {name for name in read if f"`{name}`" not in text} == set()
