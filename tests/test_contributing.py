"""The recipes of CONTRIBUTING.md are code that runs, on files that are there."""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = {
    part.split("\n", 1)[0]: part
    for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)
    if part.startswith("Add ")
}


def _blocks(recipe: str, language: str) -> list[str]:
    """Code blocks of a recipe, which may stand within a numbered list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", recipe, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


def test_the_usual_additions_have_a_recipe() -> None:
    kinds = (
        "an operator",
        "a head with its loss",
        "a score",
        "an option",
        "a product",
        "a dataset layout",
        "a weight format",
        "a kind of parallelism",
    )
    assert list(RECIPES) == [f"Add {kind}" for kind in kinds]


@pytest.mark.parametrize("title", RECIPES)
def test_the_code_of_a_recipe_runs(title: str) -> None:
    """From top to bottom in one namespace; its last block checks what was added."""
    code = "\n".join(_blocks(RECIPES[title], "python"))
    assert "assert" in code or "check_against_definition(" in code
    exec(compile(code, title, "exec"), {"__name__": __name__})


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_ends_in_tests_that_exist(title: str) -> None:
    (command,) = _blocks(RECIPES[title], "bash")
    assert RECIPES[title].rstrip().endswith("```")
    path = re.fullmatch(r"pytest (\S+)( -k \w+)?", command.strip())
    assert path is not None
    assert (REPOSITORY / path[1]).is_dir()
