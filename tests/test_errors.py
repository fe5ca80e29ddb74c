"""A wrong name gets the nearest known one, and a message names settings as its reader writes them."""

from __future__ import annotations

import ast
import re

import pytest

from fastfold.errors import ConfigError, as_option, settings_spelled, spelled, suggest
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
    r"'(fastfold|ray) [^']*'|-m fastfold [^\"']*|fastfold (plan|infer) [^\"']*|(torchrun|srun)\b.*|--multirun|--help"
)
"""Commands, and options of other programs, in messages."""


def test_no_error_below_the_command_line_names_its_options() -> None:
    below = {
        path: tree
        for path, tree in package_trees().items()
        if not {"cli", "commands", "command_line"} & {*path.parts} and not path.name.startswith("command")
    }
    wrong = []
    for path, tree in below.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                text = "".join(
                    one.value
                    for one in ast.walk(node.exc)
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                )
                if found := re.search(r"(?<![\w-])--[a-z][a-z-]+", OF_OTHERS.sub("", text)):
                    wrong.append(f"{path}:{node.lineno}: {found[0]}")
    assert not wrong, "\n".join(wrong)
