"""Commands in a process where a package cannot be imported, as if it were not installed."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def run_without(module: str, *arguments: str) -> int:
    """Run a ``fastfold`` command without a module, in a process that ends afterwards."""

    class Without(PathFinder):
        @classmethod
        def find_spec(cls, name: str, *where: Any) -> ModuleSpec | None:
            return None if name.partition(".")[0] == module else PathFinder.find_spec(name, *where)

    sys.meta_path[sys.meta_path.index(PathFinder)] = Without
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        del sys.modules[name]
    from fastfold.cli import main

    return main(arguments)


if __name__ == "__main__":
    sys.exit(run_without(*sys.argv[1:]))
