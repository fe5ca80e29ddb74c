"""Syntax trees of the package's files, parsed once for all tests that read them."""

from __future__ import annotations

import ast
import functools
import gc
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

PACKAGE_FILES = sorted((REPOSITORY / "fastfold").rglob("*.py"))

MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE_FILES
}
"""The package's files, by the dotted names of their modules."""


def parse_files(paths: Iterable[Path]) -> dict[Path, ast.Module]:
    """Parse files without the searches for garbage that so many new objects bring."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return {path: ast.parse(path.read_text("utf-8")) for path in paths}
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def package_trees() -> dict[Path, ast.Module]:
    """Return the trees of the package's files, by their paths in the repository; not to be changed."""
    return {path.relative_to(REPOSITORY): tree for path, tree in parse_files(PACKAGE_FILES).items()}


def walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements within it, in the order of :func:`ast.walk` but without expressions."""
    waiting = deque([node])
    while waiting:
        node = waiting.popleft()
        waiting.extend(x for x in ast.iter_child_nodes(node) if not isinstance(x, ast.expr))
        yield node
