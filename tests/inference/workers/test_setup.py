"""What the workers of a screen are made of, and where they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.data.targets import Chain, Target
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.inference.workers import ray_cluster, setup
from fastfold.inference.workers.job import Job, Worker
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.worker import FoldWorker
from fastfold.utils.units import GIB

TARGETS = [Target(name, (Chain("A", "MKV"),), "", name, ()) for name in ("a", "b")]


def _setup(device: str = "cpu", **where: object) -> setup.Setup:
    return setup.Setup(
        networks=[],
        request=InferRequest((), Path("out"), config=InferConfig(device=device)),
        where=replace(ScreenOptions(), **where),  # type: ignore[arg-type]
        search=None,
        say=lambda line: None,
    )


def test_a_fold_has_the_number_and_the_cost_of_its_target() -> None:
    """Without searches nothing has to come first, and on GPUs the host's memory is not shared out."""
    jobs = _setup().jobs(TARGETS, [3.0, 5.0], on_cpu=False)
    assert [(job.id, job.name, job.kind, job.cost) for job in jobs] == [
        (0, "a", "fold", 3.0),
        (1, "b", "fold", 5.0),
    ]
    assert all(job.smallest == 0 and not job.needs for job in jobs)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("brings", [False, True])
def test_a_fold_on_a_processor_has_the_memory_of_its_network_with_templates(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, brings: bool
) -> None:
    """Without templates in any way they take none; otherwise as many as the network shows."""
    seen: list[object] = []

    def smallest_memory(networks: object, config: object, templates: int | None) -> Callable[[Target], int]:
        seen.append(templates)
        return lambda target: {"a": 5, "b": 7}[target.name]

    monkeypatch.setattr(setup, "smallest_memory", smallest_memory)
    made = _setup()
    if wanted:
        templates = TemplateOptions(structures=(Path("x.cif"),))
        options = RunOptions(templates=templates)
        made = replace(made, request=replace(made.request, options=options))
    targets = [replace(TARGETS[0], templates=({},)) if brings else TARGETS[0], TARGETS[1]]
    jobs = made.jobs(targets, [1.0, 2.0], on_cpu=True)
    assert [job.smallest for job in jobs] == [5, 7]
    assert seen == [None if wanted or brings else 0]


def test_the_smallest_memory_of_a_target_is_that_of_the_largest_of_its_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    networks: Any = [
        SimpleNamespace(name=name, info=SimpleNamespace(config=size, parameters=10))
        for name, size in (("m", 3), ("n", 5))
    ]
    monkeypatch.setattr(setup, "apply_settings", lambda _, config: config)
    monkeypatch.setattr(setup, "suitable", lambda networks, target: networks[: len(target.name)])
    monkeypatch.setattr(
        setup, "Planner", lambda size, *_, **more: SimpleNamespace(smallest=lambda residues: size * residues)
    )
    smallest = setup.smallest_memory(networks, InferConfig(), 0)
    assert [smallest(replace(TARGETS[0], name=name)) for name in ("a", "ab")] == [9, 15]


def test_a_job_of_several_targets_costs_their_sum_and_takes_the_largest_memory() -> None:
    members = tuple(
        Job(number, name, "fold", None, cost, smallest=size, needs=frozenset({9}))
        for number, name, cost, size in ((2, "x", 1.0, 30), (4, "y", 2.5, 10), (5, "z", 4.0, 20))
    )
    job = setup._together(members, 8)
    assert (job.id, job.name, job.cost, job.smallest) == (10, "x and 2 more", 7.5, 30)
    assert (job.needs, job.members, job.kind) == (frozenset({9}), members, "fold")


@pytest.mark.parametrize("gib", [1.0, 2.0])
def test_a_limit_that_leaves_nothing_to_fold_with_is_refused(
    monkeypatch: pytest.MonkeyPatch, gib: float
) -> None:
    monkeypatch.setattr(setup, "worker_bytes", lambda networks, precision: 2 * GIB)
    monkeypatch.setattr(setup, "resident_bytes", lambda process: 1)
    with pytest.raises(ConfigError, match=r"an idle worker takes 2\.00 GiB"):
        _setup(memory_limit=int(gib * GIB)).memory_plan()
    _setup(memory_limit=2 * GIB + 1).memory_plan()
    monkeypatch.setattr(setup, "resident_bytes", lambda process: 0)
    with pytest.raises(ConfigError, match="memory_limit= needs Linux"):
        _setup(memory_limit=2 * GIB + 1).memory_plan()
    _setup().memory_plan()


def test_each_worker_has_a_gpu_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="workers=3: each worker needs a separate GPU; available: 2"):
        _setup("cuda", workers=3).start()
    with pytest.raises(ConfigError, match="available: 1"):
        _setup("cuda:1", workers=2).start()


@pytest.mark.parametrize(
    ("device", "gpus", "kinds", "groups"),
    [
        ("cuda", 6, "cuda", [("fold", 6, 1)]),
        ("cpu", 6, "cpu", [("fold", 4, 0), ("finish", 4, 0)]),
        ("cuda:0", 0, "", []),
    ],
)
def test_workers_of_a_cluster_are_on_its_gpus_or_its_cpus(
    device: str, gpus: int, kinds: str, groups: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four machines with eight CPUs each; a worker on CPUs has those of a machine, and others finish targets."""
    made: list[ray_cluster.WorkerGroup] = []
    monkeypatch.setattr(ray_cluster, "connect", lambda address: ray_cluster.Resources(4, 32, 8, gpus))
    monkeypatch.setattr(ray_cluster, "RayExecutor", lambda groups, where, say: made.extend(groups))
    if not kinds:
        with pytest.raises(ConfigError, match=r"with `?ray=?`? the cluster chooses the GPU"):
            _setup(device, ray="auto").start()
        return
    workers = _setup(device, ray="auto").start()
    assert [(group.kind, group.count, group.gpus) for group in made] == groups
    assert (workers.count, workers.on_cpu, workers.are_finished) == (
        groups[0][1],
        kinds == "cpu",
        kinds == "cpu",
    )
    assert isinstance(made[0].function, FoldWorker)
    assert made[0].function.config.device == kinds
    assert made[0].cpus == (1 if gpus and kinds == "cuda" else 8)


def test_paths_of_a_worker_are_absolute_for_machines_with_other_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[ray_cluster.WorkerGroup] = []
    monkeypatch.setattr(ray_cluster, "connect", lambda address: ray_cluster.Resources(1, 8, 8, 0))
    monkeypatch.setattr(ray_cluster, "RayExecutor", lambda groups, where, say: made.extend(groups))
    paths = {"offload_dir": Path("disk"), "initial_guess": Path("guess.pdb"), "restraints": Path("links.csv")}
    config = InferConfig(device="cpu", **paths)  # type: ignore[arg-type]
    screened = _setup(ray="auto")
    replace(screened, request=replace(screened.request, config=config)).start()
    function = made[0].function
    assert isinstance(function, FoldWorker)
    assert {name: getattr(function.config, name) for name in paths} == {
        name: tmp_path.resolve() / path for name, path in paths.items()
    }


def test_targets_of_similar_length_that_wait_for_the_same_searches_share_a_job() -> None:
    targets = [
        Target(name, (Chain("A", "M" * length),), "", name, ())
        for name, length in (("a", 20), ("b", 40), ("c", 21), ("d", 20))
    ]
    batched = _setup()
    batched = replace(batched, request=replace(batched.request, options=RunOptions(batch=4)))
    jobs = batched.jobs(targets, [1.0, 2.0, 3.0, 4.0], on_cpu=False)
    assert [(job.id, job.cost, [one.id for one in job.members]) for job in jobs] == [
        (4, 8.0, [0, 2, 3]),
        (1, 2.0, []),
    ]
    said: list[str] = []
    limited = replace(batched, where=ScreenOptions(time_limit=5.0), say=said.append)
    assert [job.id for job in limited.jobs(targets, [1.0] * 4, on_cpu=False)] == [0, 1, 2, 3]
    assert said == ["warning: not batched: time_limit= and memory_limit= are limits of single targets"]


def test_workers_share_the_threads_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[tuple[Worker, object]]] = []
    monkeypatch.setattr(setup, "LocalExecutor", lambda workers, limits: started.append(workers))
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    for where in ({"workers": 1}, {"workers": 4}, {"workers": 7}, {"workers": 1, "cpus_per_worker": 3}):
        _setup(**where).start()
    assert [workers[0][1].threads for workers in started] == [6, 1, 1, 3]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"plots": False}, 0),
        ({}, 2),
        ({"relax": "best"}, 4),
    ],
)
def test_workers_that_draw_and_relax_have_their_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], expected: int
) -> None:
    started: list[list[tuple[Worker, object]]] = []
    monkeypatch.setattr(setup, "LocalExecutor", lambda workers, limits: started.append(workers))
    monkeypatch.setattr(setup, "available_cores", lambda: 8)
    monkeypatch.setattr(setup, "host_available_bytes", lambda: 64 * GIB)
    wanted = _setup(workers=5)
    config = replace(wanted.request.config, **settings)
    wanted = replace(wanted, request=replace(wanted.request, config=config))
    found = wanted.start()
    assert found.are_finished == (expected > 0)
    (workers,) = started
    assert [worker.kind for worker, _ in workers] == ["fold"] * 5 + ["finish"] * expected
    assert {worker.memory for worker, _ in workers[:5]} == {64 * GIB - expected * setup.PROCESS_BYTES}
    assert all(function.leaves_rest == (expected > 0) for _, function in workers[:5])  # type: ignore[attr-defined]

    started.clear()
    served = replace(wanted, adapt=lambda worker: worker)
    assert not served.start().are_finished
    assert len(started[0]) == 5
