"""Names of a package that are loaded on first use (PEP 562), so that importing the package is fast."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package, for its imports under ``if TYPE_CHECKING:``."""
    modules = _deferred_imports(package)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, found)  # later uses skip this function
        return found

    def names() -> list[str]:
        return sorted({*getattr(sys.modules[package], "__all__", ()), *modules})

    return get, names


def _deferred_imports(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports for type checkers only."""
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    blocks = [x for x in ast.parse(loader.get_source(package)).body if isinstance(x, ast.If)]
    imports = [x for block in blocks for x in block.body if isinstance(x, ast.ImportFrom)]
    return {alias.name: x.module for x in imports for alias in x.names if x.module is not None}
