"""The fastest platform that works is taken, and it is said which; one that does not work is refused."""

from __future__ import annotations

from typing import Any

import openmm
import pytest

from fastfold.errors import ConfigError
from fastfold.inference.relax import platforms
from fastfold.inference.relax.platforms import choose_platform

HERE = [openmm.Platform.getPlatform(i).getName() for i in range(openmm.Platform.getNumPlatforms())]


def test_the_cpu_says_its_threads() -> None:
    assert choose_platform("CPU").label == "CPU (1 thread)"
    chosen = choose_platform("CPU", threads=2)
    assert (chosen.label, chosen.properties["Threads"]) == ("CPU (2 threads)", "2")
    assert choose_platform("Reference").label == "Reference"


def test_auto_goes_on_to_the_next_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    works = platforms._try

    def attempt(platform: Any, properties: dict[str, str]) -> None:
        tried.append(platform.getName())
        if platform.getName() != "Reference":
            raise openmm.OpenMMException("no device")
        works(platform, properties)

    monkeypatch.setattr(platforms, "_try", attempt)
    assert choose_platform().label == "Reference"
    assert tried[-2:] == ["CPU", "Reference"]


@pytest.mark.skipif("CUDA" in HERE, reason="CUDA is installed here")
def test_a_platform_that_is_not_there_is_refused_with_what_installs_it() -> None:
    with pytest.raises(
        ConfigError, match=r"CUDA cannot be used here.*has Reference, CPU.*the extra cuda12 or cuda13"
    ):
        choose_platform("CUDA")
