"""A wrong name gets the nearest known one, and a message names settings as its reader writes them."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from fastfold.data.search.settings import SearchSources
from fastfold.errors import ConfigError, as_option, settings_spelled, spelled, suggest
from fastfold.inference.sampling.settings import Sampling
from fastfold.utils.command_line.from_fields import add_field_options
from tests.helpers.syntax_trees import package_trees

KNOWN = ("num_recycles", "num_relax", "seeds")


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("num_recycels", {}, "did you mean num_recycles?"),
        ("xyz", {}, "check the spelling"),
        ("xyz", {"otherwise": "the names are a, b"}, "the names are a, b"),
        ("num_recycels", {"cutoff": 0.99}, "check the spelling"),
        ("num_recycels", {"meant": "seeds"}, "did you mean seeds?"),
    ],
)
def test_a_wrong_name_gets_a_remedy(name: str, settings: dict[str, str], expected: str) -> None:
    assert suggest(name, KNOWN, **settings) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "argument", "option"),
    [
        ("leave out `num_recycles`", "leave out num_recycles=", "leave out --num-recycles"),
        ("use `precision=bf16`", "use precision='bf16'", "use --precision bf16"),
        ("use `num_recycles=3`", "use num_recycles=3", "use --num-recycles 3"),
        ("give `out=DIR`", "give out=DIR", "give --out DIR"),
        ("use `overwrite=True`", "use overwrite=True", "use --overwrite"),
        ("a `quote", "a `quote", "a `quote"),
    ],
)
def test_a_setting_is_spelled_for_its_reader(text: str, argument: str, option: str) -> None:
    error = ConfigError(text)
    assert str(error) == spelled(text) == argument
    with settings_spelled(as_option):
        assert str(error) == spelled(text) == option
    assert str(error) == argument


OF_OTHERS = re.compile(
    r"'(fastfold|ray|mmseqs) [^']*'|-m fastfold .*|fastfold \w+( [^'\"]*)? --.*|(torchrun|srun)\b.*"
)
"""Commands in messages, with their options."""
DECLARING = ("option", "argument", "_number", "_filter")
"""Functions that declare options; a ``partial`` of one is another."""
EXTERNAL = (
    "data/databases/download.py",
    "data/search/colabfold/mmseqs.py",
    "products/design/results/program.py",
)
"""Modules with the options of programs that they start."""


@cache
def _texts() -> list[tuple[str, str]]:
    """Return places and texts of all modules below the command line."""
    return [
        (f"{path}:{line}", text)
        for path, tree in package_trees().items()
        if not {"cli", "commands", "command_line"} & {*path.parts} and not path.name.startswith("command")
        if not path.as_posix().endswith(EXTERNAL)
        for line, text in _strings(tree)
    ]


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield lines and texts of a module, other than docstrings and the declarations of options."""
    left_out: set[ast.AST] = set()
    declaring = set(DECLARING)
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="partial"), args=[ast.Name(id=declared)]),
            ) if declared in declaring:
                declaring.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left_out.add(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in declaring:
            left_out.update(ast.walk(node))
        if isinstance(node, ast.FunctionDef) and node.name in DECLARING:
            left_out.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node not in left_out:
            left_out.update(node.values)
            yield (
                node.lineno,
                "".join(one.value if isinstance(one, ast.Constant) else "{}" for one in node.values),
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            yield node.lineno, node.value


def test_no_text_below_the_command_line_names_its_options() -> None:
    wrong = [
        f"{place}: {flag[0]}"
        for place, text in _texts()
        if (flag := re.search(r"(?<![\w-])--[a-z][a-z-]+", OF_OTHERS.sub("", text)))
    ]
    assert not wrong, "\n".join(wrong)


def _fields(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the classes and the names of annotated fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    yield node.name, one.target.id


def test_every_setting_in_a_message_is_a_field_or_an_argument() -> None:
    """In Python a message names the field, which the command line spells as its option."""
    trees = package_trees()
    fields = {one for tree in trees.values() for one in _fields(tree)}
    names = {name for _, name in fields}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                names |= {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    checked, wrong = 0, []
    for place, text in _texts():
        if "metrics/scores.py" in place:  # definitions for documents
            continue
        for kind, name in re.findall(r"(?<!`)`(?:([A-Z]\w*)\.)?([a-z]\w*)(?:=[^`]*)?`(?!`)", text):
            checked += 1
            if (kind, name) not in fields if kind else name not in names:
                wrong.append(f"{place}: {kind}.{name}")
    assert checked > 100
    assert not wrong, "\n".join(wrong)


def test_a_field_with_another_name_is_spelled_as_its_option() -> None:
    add_field_options({"": argparse.ArgumentParser()}, SearchSources, Sampling)
    error = ConfigError("`SearchSources.server=URL` excludes `Sampling.fraction`; see `Sampling.method`")
    assert str(error) == "SearchSources.server=URL excludes Sampling.fraction; see Sampling.method"
    with settings_spelled(as_option):
        assert str(error) == "--msa-server URL excludes --sample-fraction; see --sample"
