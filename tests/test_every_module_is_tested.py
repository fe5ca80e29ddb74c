"""No module of the package is tested only through others."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.syntax_trees import MODULES, package_trees, parse_files, walk_statements

PASSED_ON = {"fastfold._version"}
"""One string, which ``fastfold.__version__`` passes on."""


def _imported(tree: ast.Module) -> dict[str, str]:
    """What a file imports, at its top or within functions: the dotted name behind each name that it binds."""
    found = {}
    for node in walk_statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


@functools.cache
def _given_out() -> dict[str, str]:
    """The names that packages give out, lazily or not, with where they come from."""
    return {
        f"{name}.{local}": origin
        for (name, path), tree in zip(MODULES.items(), package_trees().values(), strict=True)
        if path.name == "__init__.py"
        for local, origin in _imported(tree).items()
    }


def _module(dotted: str) -> str | None:
    """The module that a dotted name belongs to: ``fastfold.parallel.Group`` is of ``fastfold.parallel.comm.groups``."""
    while dotted in _given_out() and dotted not in MODULES:
        dotted = _given_out()[dotted]
    if dotted in MODULES:
        return dotted
    parent, _, _ = dotted.rpartition(".")
    return _module(parent) if parent else None


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return None


def _names(tree: ast.Module) -> Iterator[str]:
    """Every dotted name of ours that a file imports, reaches through an import, or has as a string."""
    imported = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            first, _, rest = dotted.partition(".")
            yield f"{imported.get(first, first)}.{rest}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value


def _modules_named_in(tree: ast.Module) -> set[str]:
    found = {_module(name) for name in _names(tree) if name.split(".")[0] == "fastfold"}
    return {name for name in found if name is not None}


def modules_named_by(source: str) -> set[str]:
    """The modules that the Python source of a test names."""
    return _modules_named_in(ast.parse(source))


@pytest.mark.long
def test_every_module_is_named_by_a_test() -> None:
    """A file below ``tests`` names a module if it imports the module or something from it, be it through the package
    that gives the name out; if it reaches into the module through an imported package (``kernels.pair_bias``); or if it
    has the dotted path as a string, as ``monkeypatch.setattr`` and ``importlib`` take it. Prose does not count, nor
    does a name of the same spelling elsewhere."""
    files = [path for path in (REPOSITORY / "tests").rglob("*.py") if path != Path(__file__)]
    named = set().union(*map(_modules_named_in, parse_files(files).values()))
    missing = [
        name
        for name, path in MODULES.items()
        if path.name not in ("__init__.py", "__main__.py") and name not in named | PASSED_ON
    ]
    assert len(MODULES) > 250
    assert not missing, "\n".join(missing)


def test_what_names_a_module() -> None:
    groups = {"fastfold.parallel.comm.groups"}
    assert modules_named_by("from fastfold.parallel.comm.groups import Group") == groups
    assert modules_named_by("from fastfold.parallel.comm import groups") == groups
    assert modules_named_by("from fastfold.parallel import Group") == groups
    assert modules_named_by("import fastfold.parallel.comm.groups as g") == groups
    assert modules_named_by("from fastfold import parallel as p\np.Group(1)") >= groups
    assert modules_named_by("import fastfold\nfastfold.parallel.Group(1)") >= groups
    assert modules_named_by("patch('fastfold.parallel.comm.groups.shard_sizes', None)") == groups
    assert modules_named_by("from fastfold.parallel import best_plans") == {
        "fastfold.parallel.planner.search"
    }
    assert not modules_named_by("'See fastfold.parallel.comm.groups.'\nclass Group: pass\nGroup()")
    assert not modules_named_by("from elsewhere import groups\ngroups.Group()") & groups
