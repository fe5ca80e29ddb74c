"""Conditions on lines of a table, such as ``ipsae_max>0.5 and rank==1``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastfold.errors import ConfigError, suggest

Condition = Callable[[Mapping[str, Any]], bool]

_MAX_LENGTH = 1000
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def parse_condition(text: str, columns: Sequence[str]) -> Condition:
    """Parse a condition, and return a function that tells of a line if it meets it, or raise ConfigError.

    Comparisons (``>``, ``>=``, ``<``, ``<=``, ``==``, ``!=``, ``in``) of columns with numbers or quoted text are joined
    by ``and``, ``or`` and ``not``. ``"P1" in partner_1`` looks for a part of a text. A comparison with a missing value
    is false.
    """
    try:
        if len(text) > _MAX_LENGTH:
            raise SyntaxError
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _not_understood(text[:60]) from None
    return _condition(tree.body, columns)


def _condition(node: ast.expr, columns: Sequence[str]) -> Condition:
    match node:
        case ast.BoolOp(op=op, values=values):
            parts = [_condition(value, columns) for value in values]
            combine = all if isinstance(op, ast.And) else any
            return lambda row: combine(part(row) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _condition(operand, columns)
            return lambda row: not inner(row)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [_value(one, columns) for one in (left, *comparators)]
            tests = [_comparison(op, node) for op in ops]
            return lambda row: all(
                _holds(test, sides[i](row), sides[i + 1](row)) for i, test in enumerate(tests)
            )
    raise _not_understood(ast.unparse(node))


def _comparison(op: ast.cmpop, node: ast.expr) -> Callable[[Any, Any], bool]:
    if isinstance(op, ast.In):
        return lambda part, whole: isinstance(whole, str) and str(part) in whole
    if type(op) not in _COMPARISONS:
        raise _not_understood(ast.unparse(node))
    return _COMPARISONS[type(op)]


def _holds(test: Callable[[Any, Any], bool], one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    try:
        return test(one, other)
    except TypeError:  # a number and a text
        return False


def _value(node: ast.expr, columns: Sequence[str]) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that reads a side of a comparison."""
    match node:
        case ast.Constant(value=int() | float() | str() as constant):
            return lambda row: constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as constant)):
            return lambda row: -constant
        case ast.Name(id=name) if name in columns:
            return lambda row: row.get(name)
        case ast.Name(id=name):
            hint = suggest(name, columns, otherwise=f"the columns are {', '.join(columns)}")
            raise ConfigError(f"--where: no column {name!r}; {hint}")
    raise _not_understood(ast.unparse(node))


def _not_understood(text: str) -> ConfigError:
    return ConfigError(f'--where: expected a condition such as "ipsae_max>0.5 and rank==1", found {text!r}')
