"""Workers in a Ray cluster, with a Ray that is made up: machines that go away, that differ, and that never come."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fastfold._version import __version__
from fastfold.errors import ConfigError
from fastfold.inference.workers.job import Finished, Gone, Job, JobResult, Ready, ScreenError, Task, Worker
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.ray_cluster import Machine, RayExecutor, Resources, WorkerGroup, connect
from tests.inference.workers.functions import act

TASK = Task(Job(0, "T1", "fold", None, 1.0), None)
HERE = Machine("node-1", 1 << 30, __version__)


class RayError(Exception):
    """As Ray has it."""


class FakeRay:
    """The part of Ray that is used. Calls are answered in their order, as the test says."""

    def __init__(self, answer: Callable[[str, Any], Any], nodes: list[dict[str, Any]] | None = None) -> None:
        self.exceptions = type("exceptions", (), {"RayError": RayError})
        self.answer, self._nodes = answer, nodes or []
        self.options: list[dict[str, Any]] = []
        self.killed: list[Any] = []
        self.inits: list[dict[str, Any]] = []
        self.failures: list[Exception] = []

    def init(self, **settings: Any) -> None:
        self.inits.append(settings)
        if self.failures:
            raise self.failures.pop(0)

    def shutdown(self) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options.append(options)
        fake = self

        class Handle:
            def __getattr__(self, method: str) -> Any:
                def call(*arguments: Any) -> tuple[str, int, Any]:
                    return method, fake.next(), arguments

                return type("method", (), {"remote": staticmethod(call)})

            @staticmethod
            def remote(*arguments: Any) -> Any:
                return Handle()

        return lambda kind: Handle

    def next(self) -> int:
        self.count = getattr(self, "count", 0) + 1
        return self.count

    def wait(self, calls: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns <= max(1, len(calls))
        return calls[:1], calls[1:]

    def get(self, call: Any) -> Any:
        found = self.answer(call[0], call[2])
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        self.killed.append(actor)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(lambda method, _: HERE if method == "describe" else JobResult("done"))
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    return fake


def executor(count: int = 1, **group: Any) -> RayExecutor:
    return RayExecutor([WorkerGroup("fold", count, act, **group)], ScreenOptions())


def test_a_worker_is_ready_when_its_machine_answers_and_gives_results(ray: FakeRay):
    running = executor(cpus=4)
    assert running.wait(0) == [Ready(Worker("fold-1", "fold", "node-1", 1 << 30))]
    running.start("fold-1", TASK)
    assert running.wait(0) == [Finished("fold-1", JobResult("done"))]
    assert ray.options == [{"num_cpus": 4, "num_gpus": 0, "max_restarts": 0}]
    running.close()
    assert len(ray.killed) == 1


def test_a_worker_with_a_gpu_takes_no_memory_of_its_machine(ray: FakeRay):
    (event,) = executor(gpus=1).wait(0)
    assert isinstance(event, Ready)
    assert event.worker.memory is None


def test_a_worker_whose_machine_goes_away_is_replaced_under_another_name(ray: FakeRay):
    running = executor()
    running.wait(0)
    running.start("fold-1", TASK)
    ray.answer = lambda method, _: RayError("node died\nand so on") if method == "run" else HERE
    assert running.wait(0) == [Gone("fold-1", "node died")]
    assert running.wait(0) == [Ready(Worker("fold-2", "fold", "node-1", 1 << 30))]


def test_workers_that_never_start_end_the_run(ray: FakeRay):
    ray.answer = lambda method, _: RayError("no module named fastfold")
    running = executor()
    assert [type(event) for event in (*running.wait(0), *running.wait(0))] == [Gone, Gone]
    with pytest.raises(ScreenError, match="3 times in a row: no module named fastfold"):
        running.wait(0)


def test_a_machine_with_another_version_is_refused(ray: FakeRay):
    ray.answer = lambda method, _: HERE._replace(version="0.0.1")
    with pytest.raises(ScreenError, match=r"has FastFold 0\.0\.1"):
        executor().wait(0)


def test_a_cluster_that_is_gone_ends_the_run(ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    running = executor()

    def wait(*_: Any, **__: Any) -> Any:
        raise RayError("GCS is down")

    monkeypatch.setattr(ray, "wait", wait)
    with pytest.raises(ScreenError, match="lost the connection to the Ray cluster: GCS is down"):
        running.wait(0)


def test_what_a_cluster_has_is_counted_over_its_machines(ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    ray._nodes = [
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}},
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 99.0}},
    ]
    assert connect("auto") == Resources(machines=2, cpus=20, smallest=4, gpus=2)
    (settings,) = ray.inits
    assert settings["address"] == "auto"
    assert "runtime_env" not in settings, "nothing is uploaded"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_ray_that_starts_too_slowly_on_this_machine_is_started_again(ray: FakeRay):
    ray.failures = [Exception("The current node timed out during startup.")] * 2
    connect("local")
    assert len(ray.inits) == 3
    ray.failures = [Exception("The current node timed out during startup.")] * 3
    with pytest.raises(ConfigError, match="timed out during startup"):
        connect("local")


def test_a_cluster_that_is_not_there_is_named_with_the_remedy(ray: FakeRay):
    ray.failures = [ConnectionError("could not find any running Ray instance")]
    with pytest.raises(ConfigError, match=r"ray='auto': could not find .* start a cluster with"):
        connect("auto")
    assert len(ray.inits) == 1


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'fastfold\[ray\]'"):
        connect("auto")
