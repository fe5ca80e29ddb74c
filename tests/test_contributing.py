"""The recipes of CONTRIBUTING.md are code that runs, on files that are there."""

from __future__ import annotations

import re
import sys
import textwrap
from types import ModuleType

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
def test_the_code_of_a_recipe_runs(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom in one namespace; its last block checks what was added.

    A block of a new file has its own imports, and later ones can import it.
    """
    blocks, names = _blocks(RECIPES[title], "python"), {"__name__": __name__}
    assert "assert" in blocks[-1] or "check_against_definition(" in blocks[-1]
    for step in re.split(r"^\d+\. ", RECIPES[title], flags=re.MULTILINE):
        for code in _blocks(step, "python"):
            place = re.match(r"\*\*`(fastfold/\S+)\.py`", step)
            if place is None or (REPOSITORY / f"{place[1]}.py").exists():
                exec(compile(code, title, "exec"), names)
                continue
            module = ModuleType(place[1].replace("/", "."))
            exec(compile(code, title, "exec"), vars(module))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            names |= vars(module) | {"__name__": __name__}


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_ends_in_tests_that_exist(title: str) -> None:
    (command,) = _blocks(RECIPES[title], "bash")
    assert RECIPES[title].rstrip().endswith("```")
    path = re.fullmatch(r"pytest (\S+)( -k \w+)?", command.strip())
    assert path is not None
    assert (REPOSITORY / path[1]).is_dir()
