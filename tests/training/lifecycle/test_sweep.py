"""A sweep trains every combination, each in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.errors import ConfigError
from fastfold.training.compose import compose_config
from fastfold.training.lifecycle import sweep


def test_every_combination_has_its_folder() -> None:
    jobs = sweep.sweep_jobs(
        [
            "+preset=mini",
            "data.directory=x",
            "trainer.out=runs",
            "optim.lr=1e-3,1e-4",
            "trainer.seed=range(2)",
        ]
    )
    names = [f"optim.lr={rate},trainer.seed={seed}" for rate in ("0.001", "0.0001") for seed in (0, 1)]
    assert list(jobs) == [Path("runs") / name for name in names]
    for place, overrides in jobs.items():
        config = compose_config(overrides)
        assert config.trainer.out == str(place)
        assert f"optim.lr={config.optim.lr},trainer.seed={config.trainer.seed}" == place.name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.out=y", "optim.lr=1e-3"], "needs a setting with several values"),
        (["optim.lr=1e-3,1e-4"], "trainer.out is not set"),
        (["trainer.out=y", "optim.lr=1e-3,-1"], "optim.lr must be"),
        (["trainer.out=y", "optim.learning=1,2"], "no setting 'optim.learning'"),
    ],
)
def test_a_wrong_run_is_refused_before_the_first_begins(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep.sweep_jobs(["data.directory=x", *overrides])


def test_launchers_of_hydra_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"hydra/launcher: .* start each by its own command"):
        sweep.sweep_jobs(["hydra/launcher=joblib", "data.directory=x", "trainer.out=y", "trainer.seed=1,2"])


def test_a_run_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, started, said = iter((0, 3, 4)), [], []

    def run(command: list[str]) -> Any:
        started.append(command[3:])
        return SimpleNamespace(returncode=next(codes))

    monkeypatch.setattr(sweep.subprocess, "run", run)
    given = ["data.directory=x", "trainer.out=y", "trainer.seed=1,2,3"]
    assert sweep.run_sweep(given, said.append) == 3
    assert [command[0] for command in started] == ["train"] * 3
    assert said == [
        f"run 1 of 3: {Path('y/trainer.seed=1')}",
        f"run 2 of 3: {Path('y/trainer.seed=2')}",
        "run 2 of 3 ended with exit code 3",
        f"run 3 of 3: {Path('y/trainer.seed=3')}",
        "run 3 of 3 ended with exit code 4",
    ]


def test_several_processes_sweep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one after another"):
        sweep.run_sweep(["trainer.seed=1,2"], print)
