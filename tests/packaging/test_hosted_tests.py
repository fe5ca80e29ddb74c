"""The workflow of a public host runs what decides whether a change lands, on the platforms that the documents name."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from fastfold.cli.command import COMMANDS
from tests.conftest import REPOSITORY

WORKFLOW: dict[str, Any] = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())


def commands(job: str) -> list[str]:
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_linux_runs_all_checks_of_a_change() -> None:
    decides = re.findall(r"^make .*$", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)
    assert commands("linux") == decides
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in decides} <= targets


def test_wheels_are_tried_outside_of_the_checkout_on_each_system() -> None:
    job = WORKFLOW["jobs"]["wheel"]
    systems = {name.split("-")[0] for name in job["strategy"]["matrix"]["os"]}
    assert systems == {"ubuntu", "macos", "windows"}
    tried = [command for command in commands("wheel") if "fastfold" in command]
    assert tried
    for command in tried:
        words = shlex.split(command)
        assert words[words.index("fastfold") - 2 : words.index("fastfold")] == ["outside", "&&"]
        assert words[words.index("fastfold") + 1] in COMMANDS
