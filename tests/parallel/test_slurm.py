"""Tasks of srun are ranks, and nothing else of SLURM is."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError
from fastfold.parallel.slurm import _adopt_srun, _first_host

JOB = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("gpu[003-006,010],login1", "gpu003"),
        ("a-b.example.org,c", "a-b.example.org"),
        ("rack[2,7]-x", "rack2-x"),
        ("n1,n[2-3]", "n1"),
    ],
)
def test_the_first_host(nodes: str, host: str) -> None:
    assert _first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", ",a", "[1-2]", "a b"])
def test_what_is_no_list_of_nodes(nodes: str) -> None:
    with pytest.raises(ValueError, match="expected a list of nodes"):
        _first_host(nodes)


def test_a_task_of_a_step_is_a_rank() -> None:
    found = dict(STEP)
    _adopt_srun(found)
    assert {k: found[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "gpu003",
    }
    assert 20_000 <= int(found["MASTER_PORT"]) < 40_000
    other = STEP | {"SLURM_STEP_ID": "3"}
    _adopt_srun(other)
    assert other["MASTER_PORT"] != found["MASTER_PORT"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        JOB,  # a batch script, which is not started once per task
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"RANK": "1", "WORLD_SIZE": "2"},  # torchrun, started by srun
    ],
)
def test_without_several_tasks_nothing_changes(environment: dict[str, str]) -> None:
    found = dict(environment)
    _adopt_srun(found)
    assert found == environment


def test_an_address_that_was_chosen_stays() -> None:
    found = STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    _adopt_srun(found)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["RANK"]) == ("10.0.0.1", "29500", "11")


def test_variables_that_are_missing_are_named_with_the_line_to_type() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_PROCID.*srun --ntasks-per-node 1 torchrun"):
        _adopt_srun({name: value for name, value in STEP.items() if name != "SLURM_PROCID"})
