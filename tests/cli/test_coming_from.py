"""The tables for users of other programs name options that exist, and have no gaps."""

from __future__ import annotations

import re

import pytest

from fastfold.cli.command import _parser
from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "docs" / "coming_from.md").read_text()
ROWS = [line.strip("|").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]


def option_names() -> list[set[str]]:
    """The names of each option of each command."""
    found, waiting = [], [_parser()]
    for parser in waiting:
        for action in parser._actions:
            found.append(set(action.option_strings))
            if action.dest == "==SUPPRESS==" and isinstance(action.choices, dict):
                waiting += action.choices.values()
    return found


def test_documents_name_every_long_option() -> None:
    """By one of its names: some have AlphaFold's or ColabFold's as well."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"--[A-Za-z0-9][\w-]*", page.read_text(encoding="utf-8"))
    }
    long = [{name for name in names if name.startswith("--")} for names in option_names()]
    assert len([names for names in long if names]) > 200
    assert [names for names in long if names and not names & named] == []


def test_every_row_has_an_answer() -> None:
    assert len(ROWS) > 60
    assert all(len(row) == 2 and all(cell.strip() for cell in row) for row in ROWS)
    assert not re.search("planned|todo", TEXT, re.IGNORECASE)


@pytest.mark.parametrize("page", ["coming_from.md", "hpc.md", "troubleshooting.md"])
def test_named_options_exist(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text()
    answers = " ".join(row[1] for row in ROWS) if page == "coming_from.md" else text
    commands = " ".join(line for line in text.splitlines() if line.startswith("fastfold "))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", f"{answers} {commands}"))
    slurm = {"--array", "--gpus", "--wrap", "--parsable", "--cpus-per-task", "--dependency", "--ntasks"}
    slurm |= {"--gpus-per-task", "--cores", "--executor", "--jobs"}
    assert len(named) > 5
    assert named - set().union(*option_names()) - slurm == set()
