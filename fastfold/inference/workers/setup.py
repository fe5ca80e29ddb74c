"""Set up the workers of a screen."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastfold.data.search.settings import SearchSources
from fastfold.data.targets import Target
from fastfold.errors import ConfigError, spelled
from fastfold.evoformer.precision import element_size
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.background import count_processes
from fastfold.inference.folding.batch import group_by_length
from fastfold.inference.models import Network, suitable
from fastfold.inference.network_settings import apply_settings
from fastfold.inference.planning.planner import Planner
from fastfold.inference.request import InferRequest
from fastfold.inference.workers.job import Executor, Job, Worker
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.scheduler import PROCESS_BYTES, MemoryPlan
from fastfold.inference.workers.search import EngineSearch, search_jobs
from fastfold.inference.workers.worker import FinishWorker, FoldWorker
from fastfold.inference.workers.worker_process import Function, LocalExecutor, resident_bytes
from fastfold.utils.device import choose_device
from fastfold.utils.machine import available_cores, host_available_bytes
from fastfold.utils.units import GIB

_FOLDERS_OF_PLOTTER = 4  #: Number of workers that fold whose plots one process draws


@dataclass(frozen=True)
class Workers:
    """Workers of a run: ``count`` of them fold, on CPUs that share their machine's memory or on GPUs.

    With ``are_finished``, further workers draw and relax the folded targets.
    """

    executor: Executor
    count: int
    on_cpu: bool
    text: str
    are_finished: bool = False


@dataclass(frozen=True)
class Setup:
    """Inputs of a run's workers.

    The shipped network has a different path on each machine. ``adapt`` makes the function of a worker from the one that
    folds a target, which then draws and relaxes as well; without it, plots and relaxation are jobs of further workers.
    """

    networks: Sequence[Network]
    request: InferRequest
    where: ScreenOptions
    search: EngineSearch | None
    say: Callable[[str], None]
    adapt: Callable[[FoldWorker], Function] | None = None

    def start(self) -> Workers:
        """Start the workers, or raise ConfigError."""
        return self._local() if self.where.ray is None else self._on_ray()

    def jobs(self, targets: Sequence[Target], costs: Sequence[float], *, on_cpu: bool) -> list[Job]:
        """Return all jobs of the run; a fold has the number of its target."""
        searches: list[Job] = []
        needs: list[frozenset[int]] = [frozenset()] * len(targets)
        if self.search is not None:
            searches, needs = search_jobs(targets, costs, self.search.out)
            for line in self.search.lines(targets):
                self.say(line)
        brings_templates = any(target.brings_templates for target in targets)
        has_templates = brings_templates or self.request.options.templates.wanted
        templates = None if has_templates else 0
        smallest = (
            smallest_memory(self.networks, self.request.config, templates) if on_cpu else lambda target: 0
        )
        folds = [
            Job(i, target.name, "fold", target, cost, smallest=smallest(target), needs=needs[i])
            for i, (target, cost) in enumerate(zip(targets, costs, strict=True))
        ]
        return [*searches, *self._grouped(folds, on_cpu=on_cpu)]

    def _grouped(self, folds: Sequence[Job], *, on_cpu: bool) -> list[Job]:
        """Return jobs of targets of similar length that wait for the same searches."""
        batch = self.request.options.batch
        if batch != 1 and self.where.has_limits:
            self.say(
                spelled("warning: not batched: `time_limit` and `memory_limit` are limits of single targets")
            )
            batch = 1
        waiting: dict[frozenset[int], list[Job]] = defaultdict(list)
        for job in folds:
            waiting[job.needs].append(job)
        device = torch.device("cpu" if on_cpu else "cuda")
        grouped: list[Job] = []
        for jobs in waiting.values():
            for group in group_by_length([job.payload.num_residues for job in jobs], batch, device):
                members = tuple(jobs[index] for index in group)
                grouped.append(members[0] if len(members) == 1 else _together(members, len(folds)))
        return grouped

    def memory_plan(self) -> MemoryPlan:
        """Return the distribution of memory, or raise ConfigError if a target's limit is too small or not supported."""
        own = worker_bytes(self.networks, self.request.config.precision)
        limit = self.where.memory_limit
        if limit is not None and not resident_bytes(os.getpid()):
            raise ConfigError(
                "`memory_limit` needs Linux, which reports the memory of a process; leave it out on this system"
            )
        if limit is not None and limit <= own:
            raise ConfigError(f"`memory_limit`: an idle worker takes {own / GIB:.2f} GiB; set a larger limit")
        # On a cluster, each worker that folds comes with one that draws and relaxes.
        rest = PROCESS_BYTES if self._has_rest and self.where.ray is not None else 0
        return MemoryPlan(own + rest, self.request.config.budget, None if limit is None else limit - own)

    @property
    def _has_rest(self) -> bool:
        """True if further workers draw and relax the folded targets."""
        return self.adapt is None and (self.request.config.plots or self.request.config.relax != "none")

    def _function(self, device: str, threads: int, sharers: int, *, leaves_rest: bool) -> FoldWorker:
        """Return the function of a worker that folds; paths are absolute for other machines."""
        return FoldWorker(
            self.request.output.resolve(),
            tuple(network.path.resolve() for network in self.networks) if self.request.weights else (),
            _absolute(replace(self.request.config, device=device)),
            # Results of searches are published before the fold.
            _absolute(replace(self.request.options, sources=SearchSources())),
            threads=threads,
            sharers=sharers,
            search=self.search,
            leaves_rest=leaves_rest,
        )

    def _local(self) -> Workers:
        where, device, gpus = self.where, self.request.config.device, 0
        if choose_device(device).type == "cuda":
            gpus = 1 if ":" in device else torch.cuda.device_count()
        devices = [device] if ":" in device else [f"cuda:{k}" for k in range(gpus)] or ["cpu"]
        count = where.workers or max(1, gpus)
        if gpus and count > gpus:
            raise ConfigError(f"`workers={count}`: each worker needs a separate GPU; available: {gpus}")
        # A single worker has the threads of `fastfold infer`, and with them its results.
        threads = where.cpus_per_worker or max(1, torch.get_num_threads() // count)
        memory = None if gpus else host_available_bytes()
        finishers = self._count_finishers(count, memory)
        if memory is not None:
            memory = max(1, memory - finishers * PROCESS_BYTES)
        workers: list[tuple[Worker, Function]] = []
        for k in range(count):
            function = self._function(
                devices[k % len(devices)], threads, count if gpus else 1, leaves_rest=finishers > 0
            )
            workers.append((Worker(f"fold-{k + 1}", "fold", memory=memory), self._adapted(function)))
        finisher = FinishWorker(function, max(1, torch.get_num_threads() // max(1, finishers)))
        workers += [(Worker(f"finish-{k + 1}", "finish"), finisher) for k in range(finishers)]
        if self.search is not None:
            workers.append((Worker("search-1", "search"), self.search))
        text = f"{_counted(count, 'worker')} on this machine, on {'GPUs' if gpus else f'CPUs ({threads} for each)'}"
        return Workers(LocalExecutor(workers, where), count, not gpus, text, finishers > 0)

    def _adapted(self, function: FoldWorker) -> Function:
        return function if self.adapt is None else self.adapt(function)

    def _count_finishers(self, count: int, memory: int | None) -> int:
        """Return how many workers draw and relax on this machine, whose free host memory is None for GPUs."""
        if not self._has_rest:
            return 0
        if self.request.config.relax == "none":
            return -(-count // _FOLDERS_OF_PLOTTER)
        cores = available_cores()
        return count if memory is None else count_processes(cores, cores, memory)

    def _on_ray(self) -> Workers:
        from fastfold.inference.workers.ray_cluster import RayExecutor, WorkerGroup, connect

        where, device = self.where, self.request.config.device
        if ":" in device:
            raise ConfigError(f"`device={device}`: with `ray` the cluster chooses the GPU; use `device=cuda`")
        cluster = connect(str(where.ray))
        gpus = 0 if device == "cpu" else cluster.gpus
        if device == "cuda" and not gpus:
            raise ConfigError("the Ray cluster lacks GPUs; use `device=cpu`")
        count = where.workers or (gpus or cluster.machines)
        share = 1 if gpus else max(1, min(cluster.cpus // count, cluster.smallest))
        cpus = where.cpus_per_worker or share
        if cpus > cluster.smallest:
            self.say(f"warning: machines with fewer than {cpus} CPUs get no worker")
        sharers = -(-gpus // cluster.machines) if gpus else 1
        # A worker without a GPU could not relax on one.
        has_finishers = self._has_rest and not gpus
        function = self._function("cuda" if gpus else "cpu", cpus, sharers, leaves_rest=has_finishers)
        groups = [WorkerGroup("fold", count, self._adapted(function), cpus, 1 if gpus else 0)]
        if has_finishers:
            groups.append(WorkerGroup("finish", count, FinishWorker(function), 0))
        if self.search is not None:
            # Without own CPUs, because on a cluster full of folds it would wait forever for one.
            groups.append(WorkerGroup("search", 1, self.search, int(cluster.cpus > count * cpus)))
        text = (
            f"{_counted(count, 'worker')} in a Ray cluster of {_counted(cluster.machines, 'machine')} with "
            f"{_counted(cluster.cpus, 'CPU')} and {_counted(cluster.gpus, 'GPU')}"
        )
        return Workers(RayExecutor(groups, where, self.say), count, not gpus, text, has_finishers)


def smallest_memory(
    networks: Sequence[Network], config: InferConfig, templates: int | None = 0
) -> Callable[[Target], int]:
    """Return a function of a target: the bytes without which no suitable network can fold it on the CPU.

    ``templates`` is the number of templates; None for the networks' maximum.
    """
    size = element_size(config.precision)
    by_network: dict[str, Callable[[int], int]] = {}
    for network in networks:
        settings = apply_settings(config, network.info.config)
        planner = Planner(
            settings, size, "cpu", parameters=network.info.parameters * size, templates=templates
        )
        # With the network's maximum of rows, because the alignments are not known yet.
        by_network[network.name] = cache(planner.smallest)

    def smallest(target: Target) -> int:
        return max(by_network[one.name](target.num_residues) for one in suitable(networks, target))

    return smallest


def worker_bytes(networks: Sequence[Network], precision: str | None) -> int:
    """Return the bytes of a worker without its folds: its process, and the parameters of all networks."""
    size = element_size(precision)
    # While a network is loaded, its file's parameters are in memory in float32.
    most = max((network.info.parameters * 4 for network in networks), default=0)
    return PROCESS_BYTES + most + sum(network.info.parameters * size for network in networks)


def _together(members: tuple[Job, ...], folds: int) -> Job:
    """Return one job for several targets, whose number follows those of all ``folds`` targets."""
    first = members[0]
    return Job(
        folds + first.id,
        f"{first.name} and {len(members) - 1} more",
        "fold",
        None,
        sum(job.cost for job in members),
        smallest=max(job.smallest for job in members),
        needs=first.needs,
        members=members,
    )


def _absolute(value: Any) -> Any:
    """Return a path, a tuple of paths, or a dataclass of them with absolute paths; others unchanged."""
    if isinstance(value, Path):
        return value.resolve()
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _absolute(getattr(value, one.name)) for one in fields(value)})
    return value


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
