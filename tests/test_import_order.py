"""Packages import from their left alone, and files never in a circle."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.syntax_trees import MODULES, package_trees

ORDER = (
    ("errors", "_version", "utils"),
    ("protein", "memory"),
    ("data", "kernels"),
    ("evoformer",),
    ("parallel",),
    ("inference",),
    ("products", "training"),
    ("cli", "__main__"),
)
"""Names directly under ``fastfold``, each allowed to import from its own place and from those before it.

``fastfold/__init__.py``, which gives out the public names lazily, and ``configs``, which holds no code, are left out.
Packages that share a place do not import each other, except as :data:`BESIDE` says."""

BESIDE = {("utils", "errors"), ("utils", "_version"), ("__main__", "cli")}
"""Who may import whom within one place."""


def _imports(tree: ast.AST, module: str) -> Iterator[str]:
    """Modules of ours that a file imports: at its top, within functions, and for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fastfold")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            if node.module and node.module.split(".")[0] == "fastfold":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in MODULES else node.module
        elif not isinstance(node, ast.expr):
            yield from _imports(node, module)


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """Modules of ours that each of them imports; read once, and by the tests alone."""
    return {
        name: set(_imports(tree, name)) - {name}
        for name, tree in zip(MODULES, package_trees().values(), strict=True)
    }


def _top(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_all_files_are_seen() -> None:
    assert len(MODULES) > 250
    assert sum(map(len, all_imports().values())) > 1000


def test_no_package_imports_from_its_right() -> None:
    place = {name: number for number, names in enumerate(ORDER) for name in names}
    wrong = []
    for module, found in all_imports().items():
        here = _top(module)
        if here in ("", "configs"):
            continue
        assert here in place, f"{here} has no place in the order"
        for other in sorted(found):
            there = _top(other)
            if there == here or (here, there) in BESIDE:
                continue
            # The top of the package gives out names of everything.
            if not there or place.get(there, len(ORDER)) >= place[here]:
                wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_product_imports_another() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, found in all_imports().items()
        for other in sorted(found)
        if _top(module) == _top(other) == "products" and module.split(".")[2:3] != other.split(".")[2:3]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_files() -> None:
    # A package's __init__ that gives out names of its modules is imported with each of them: it counts where it is
    # imported for a name of its own.
    graph = {
        module: {other for other in found if other in MODULES} for module, found in all_imports().items()
    }
    graph.pop("fastfold")
    try:
        TopologicalSorter({a: {b for b in found if b != "fastfold"} for a, found in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda p: p.name)
def test_no_folder_is_a_warehouse(folder: Path) -> None:
    """At most 15 files, so that a listing is a table of contents."""
    assert len(list(folder.glob("*.py"))) <= 15


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for module, tree in zip(MODULES, package_trees().values(), strict=True):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
