"""Every public name says what it is, and every tensor that goes in or out its shape."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.syntax_trees import package_trees

# A shape in brackets, or a reference to where it is stated, or words for tensors of any shape.
_SHAPE = re.compile(r"\[[^\]]*\]|:(func|meth|class|data):|shape|scalar|any tensor", re.IGNORECASE)
_FUNCTIONS = {"torch.autograd.Function", "Function"}
_INHERITED = {"extra_repr", "reset_parameters"}  # of torch.nn.Module and its layers


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """The syntax trees of all files, by their path in the repository."""
    return package_trees()


@pytest.fixture(scope="module")
def documented(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """The methods with a docstring of each class, by its name."""
    return {
        node.name: {
            inner.name
            for inner in node.body
            if isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner)
        }
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _public(
    tree: ast.Module, documented: dict[str, set[str]]
) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public classes and functions of a file, and public methods of its classes without those of a base class."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            if "Protocol" in bases:
                continue
            inherited = {"forward", "backward"} if bases & _FUNCTIONS else _INHERITED
            inherited = inherited.union(*(documented.get(base, set()) for base in bases))
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not (
                    inner.name.startswith("_") or inner.name in inherited
                ):
                    yield f"{node.name}.{inner.name}", inner


def test_every_public_name_has_a_docstring(
    trees: dict[Path, ast.Module], documented: dict[str, set[str]]
) -> None:
    everything = [
        (f"{path}: {name}", node) for path, tree in trees.items() for name, node in _public(tree, documented)
    ]
    assert len(everything) > 1400
    missing = [
        name
        for name, node in everything
        if ast.get_docstring(node) is None
        and not any("overload" in ast.dump(d) or "jit" in ast.dump(d) for d in node.decorator_list)
    ]
    assert not missing, "\n".join(missing)


def test_every_module_has_a_docstring(trees: dict[Path, ast.Module]) -> None:
    missing = [str(path) for path, tree in trees.items() if tree.body and ast.get_docstring(tree) is None]
    assert not missing, "\n".join(missing)


def _takes_tensors(node: ast.FunctionDef) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return any(a.annotation is not None and ast.unparse(a.annotation) == "Tensor" for a in arguments)


def test_functions_of_tensors_state_shapes(
    trees: dict[Path, ast.Module], documented: dict[str, set[str]]
) -> None:
    """Of the network, its losses, proteins and the operators: a function that takes a tensor says what shape it has."""
    missing = []
    checked = 0
    for pattern in ("evoformer/**/*.py", "protein/**/*.py", "kernels/ops/*/*op.py"):
        for path in (path.relative_to(REPOSITORY) for path in (REPOSITORY / "fastfold").glob(pattern)):
            for name, node in _public(trees[path], documented):
                if isinstance(node, ast.FunctionDef) and _takes_tensors(node):
                    checked += 1
                    if not _SHAPE.search(ast.get_docstring(node) or ""):
                        missing.append(f"{path}: {name}")
    assert checked > 100
    assert not missing, "\n".join(missing)
