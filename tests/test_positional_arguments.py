"""No function of the package takes more than seven arguments by position: the rest have names, or are a named group."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

from tests.helpers.syntax_trees import package_trees, walk_statements

MAX_POSITIONAL = 7


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it: there every argument is by position, the sizes of its blocks among them."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def _positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [x for x in walk_statements(tree) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]


def _too_many(functions: Iterable[ast.FunctionDef | ast.AsyncFunctionDef]) -> dict[str, int]:
    return {
        f"{function.name} (line {function.lineno})": _positional(function)
        for function in functions
        if not _is_kernel(function) and _positional(function) > MAX_POSITIONAL
    }


def test_no_function_takes_more_than_seven_arguments_by_position() -> None:
    functions = {str(path): _functions(tree) for path, tree in package_trees().items()}
    assert sum(map(len, functions.values())) > 2000
    assert {name: found for name, those in functions.items() if (found := _too_many(those))} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(a, b, c, d, e, f, g): ...", 0),
        ("def f(a, b, c, d, e, f, g, h=1): ...", 1),
        ("async def f(a, b, c, d, /, e, f, g, h): ...", 1),
        ("def f(a, b, c, d, e, f, g, *, h): ...", 0),
        ("class A:\n    def f(self, a, b, c, d, e, f, g): ...", 0),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h): ...", 1),
        ("def f():\n    def g(a, b, c, d, e, f, g, h): ...", 1),
        ("@triton.jit\ndef f(a, b, c, d, e, f, g, h): ...", 0),
        ("@triton.jit(do_not_specialize=['a'])\ndef f(a, b, c, d, e, f, g, h): ...", 0),
        ("@cache\ndef f(a, b, c, d, e, f, g, h): ...", 1),
    ],
)
def test_the_eighth_is_noticed(source: str, count: int) -> None:
    assert len(_too_many(_functions(ast.parse(source)))) == count
