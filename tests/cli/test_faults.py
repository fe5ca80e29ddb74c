"""Commands whose disk, locks, process or connection fails leave whole files, say why, and go on where they stopped."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.command_line import Outcome
from tests.helpers.faults.commands import CASES, CONVERT
from tests.helpers.faults.disk import Fault, Kind, install
from tests.helpers.faults.table import Case, Table, finish
from tests.helpers.forked import Forked

FAULTS = 20
"""Faults of each command, spread over the steps of its writing."""
CUTS: tuple[tuple[Kind, int], ...] = (("cut", 1), ("cut", 20_000), ("cut", 65_536), ("slow", 1024))
"""Kinds of broken connections: cut after so many bytes, or sent in pieces of so many."""
NETWORK = ("databases download", "weights download", "search", "submit")


def names(case: Case) -> str:
    return case.name.replace(" ", "_")


def check(table: Table) -> None:
    """Try all faults of the disk; threads and workers may end before the last steps of an undisturbed run."""
    assert [line for fault in table.faults(FAULTS) for line in table.problems(fault)] == []
    assert table.missed <= FAULTS // 10


def test_a_command_survives_each_kind_of_fault(tmp_path: Path) -> None:
    table = Table(CONVERT, tmp_path)
    last = len(table.steps)
    assert table.steps[-2].startswith("fsync")
    faults = [
        table.fault("ENOSPC", last // 2),
        table.fault("EIO", last - 1),
        table.fault("SIGKILL", last // 2),
    ]
    assert [line for fault in faults for line in table.problems(fault)] == []
    assert table.missed == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=names)
def test_faults_of_the_disk(case: Case, tmp_path: Path) -> None:
    check(Table(case, tmp_path))


@pytest.mark.slow
def test_faults_of_the_disk_of_a_server(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    from tests.helpers.faults.services import SERVE

    check(Table(SERVE, tmp_path))


@pytest.mark.slow
def test_faults_of_the_disk_of_a_client(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    from tests.helpers.faults.services import SERVICES

    with SERVICES["submit"](tmp_path / "server") as case:
        check(Table(case, tmp_path / "client"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORK)
def test_broken_connections(name: str, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    from tests.helpers.faults.services import SERVICES

    with SERVICES[name](tmp_path / "server") as case:
        table = Table(case, tmp_path / "client")
        found = [line for cut in CUTS for line in table.problems(table.fault(*cut))]
    assert found == []


def careless(out: str, manner: str) -> int:
    """Write a file as no command should."""
    install()
    path = Path(out, "result.json")
    text = json.dumps({"answer": list(range(5000))})
    if path.exists() and manner == "kept":
        return 0
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    except OSError as error:
        if manner == "silent":
            path.unlink(missing_ok=True)
            return 0
        if manner == "traced":
            raise
        print(f"fastfold: {error}", file=sys.stderr)
        return 1
    return 0


def careless_case(manner: str) -> Case:
    def run(table: Table, fault: Fault) -> Outcome:
        return finish(Forked(careless, str(table.out), manner, env=fault.environment()))

    return Case("careless", lambda inputs: None, lambda inputs, out: [], run=run)


@pytest.mark.parametrize(
    ("manner", "kind", "step", "problem"),
    [
        ("plain", "ENOSPC", 3, "left half a file: out/result.json"),
        ("silent", "EIO", 3, "succeeded, but out/result.json is missing"),
        ("traced", "EIO", 1, "says 'Traceback (most"),
        ("kept", "SIGKILL", 3, "run again: out/result.json differs from an undisturbed run's"),
    ],
)
def test_careless_programs_are_found(
    tmp_path: Path, manner: str, kind: Kind, step: int, problem: str
) -> None:
    table = Table(careless_case(manner), tmp_path)
    assert table.steps[:3] == ["os.mkdir out", "open out/result.json", "write out/result.json"]
    assert any(problem in line for line in table.problems(table.fault(kind, step)))


def test_steps_are_counted_in_new_interpreters(tmp_path: Path) -> None:
    """Those of workers, which a command spawns."""
    fault = Fault(str(tmp_path / "work"), str(tmp_path / "log"), "EIO", 2)
    (tmp_path / "work").mkdir()
    code = "import sys; open(sys.argv[1], 'w').close()"
    ends = [
        os.spawnve(
            os.P_WAIT,
            sys.executable,
            [sys.executable, "-c", code, str(tmp_path / place)],
            os.environ | fault.environment(),
        )
        for place in ("elsewhere", "work/a", "work/b", "work/c")
    ]
    assert ends == [0, 0, 1, 0]
    assert fault.steps() == ["open a", "open b", "open c"]
