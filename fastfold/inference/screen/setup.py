"""Set up the workers of a screen."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastfold.data.search.settings import SearchSources
from fastfold.data.targets import Target
from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.background import PROCESS_BYTES, count_processes
from fastfold.inference.folding.batch import group_by_length
from fastfold.inference.models import Network
from fastfold.inference.request import RunOptions
from fastfold.inference.screen.job import Executor, Job, Worker
from fastfold.inference.screen.local import LocalExecutor
from fastfold.inference.screen.memory_plan import MemoryPlan, TargetMemory, worker_bytes
from fastfold.inference.screen.options import ScreenOptions
from fastfold.inference.screen.scheduler import Rules
from fastfold.inference.screen.search import EngineSearch, SearchWorker, search_jobs
from fastfold.inference.screen.worker import FinishWorker, FoldWorker
from fastfold.inference.screen.worker_process import Function, Limits, resident_bytes
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
    shipped: bool
    output: Path
    config: InferConfig
    options: RunOptions
    where: ScreenOptions
    search: EngineSearch | None
    say: Callable[[str], None]
    adapt: Callable[[FoldWorker], Function] | None = None

    def start(self) -> Workers:
        """Start the workers, or raise ConfigError."""
        limits = Limits(self.where.time_limit, self.where.memory_limit)
        return self._local(limits) if self.where.ray is None else self._on_ray(limits)

    def jobs(self, targets: Sequence[Target], costs: Sequence[float], *, on_cpu: bool) -> list[Job]:
        """Return all jobs of the run; a fold has the number of its target."""
        searches: list[Job] = []
        needs: list[frozenset[int]] = [frozenset()] * len(targets)
        if self.search is not None:
            searches, needs = search_jobs(targets, costs)
        has_templates = self.options.templates.wanted or any(target.brings_templates for target in targets)
        templates = None if has_templates else 0
        memory = TargetMemory(self.networks, self.config, templates) if on_cpu else None
        folds = []
        for i, (target, cost) in enumerate(zip(targets, costs, strict=True)):
            smallest = 0 if memory is None else memory.smallest(target)
            folds.append(Job(i, target.name, "fold", target, cost, smallest=smallest, needs=needs[i]))
        return [*searches, *self._grouped(folds, on_cpu=on_cpu)]

    def _grouped(self, folds: Sequence[Job], *, on_cpu: bool) -> list[Job]:
        """Return jobs of targets of similar length that wait for the same searches."""
        batch = self.options.batch
        if batch != 1 and self.where.has_limits:
            self.say("warning: not batched: --time-limit and --memory-limit are limits of single targets")
            batch = 1
        waiting: dict[frozenset[int], list[Job]] = defaultdict(list)
        for job in folds:
            waiting[job.needs].append(job)
        device = torch.device("cpu" if on_cpu else "cuda")
        found: list[Job] = []
        for jobs in waiting.values():
            for group in group_by_length([job.payload.num_residues for job in jobs], batch, device):
                members = tuple(jobs[index] for index in group)
                found.append(members[0] if len(members) == 1 else _together(members, len(folds)))
        return found

    def rules(self) -> Rules:
        """Return the distribution of memory, or raise ConfigError if a target's limit is too small or not supported."""
        own = worker_bytes(self.networks, self.config.precision)
        limit = self.where.memory_limit
        if limit is not None and not resident_bytes(os.getpid()):
            raise ConfigError(
                "--memory-limit needs Linux, which reports the memory of a process; leave it out on this system"
            )
        if limit is not None and limit <= own:
            raise ConfigError(f"--memory-limit: an idle worker takes {own / GIB:.2f} GiB; set a larger limit")
        # On a cluster, each worker that folds comes with one that draws and relaxes.
        rest = PROCESS_BYTES if self._has_rest and self.where.ray is not None else 0
        return Rules(MemoryPlan(own + rest, self.config.budget, None if limit is None else limit - own))

    @property
    def _has_rest(self) -> bool:
        """True if further workers draw and relax the folded targets."""
        return self.adapt is None and (self.config.plots or self.config.relax != "none")

    def _function(self, device: str, threads: int, sharers: int, *, leaves_rest: bool) -> FoldWorker:
        """Return the function of a worker that folds; paths are absolute for other machines."""
        weights = () if self.shipped else tuple(network.path.resolve() for network in self.networks)
        given, templates = self.config, self.options.templates
        files: dict[str, Any] = {
            name: _resolved(getattr(given, name)) for name in ("initial_guess", "restraints")
        }
        several = ("structures", "alignments", "complexes", "chains")
        paths: dict[str, Any] = {
            name: tuple(path.resolve() for path in getattr(templates, name)) for name in several
        }
        paths |= {name: _resolved(getattr(templates, name)) for name in ("database", "mmcif_dir", "obsolete")}
        options = replace(
            self.options,
            sources=SearchSources(),  # their results are published before the fold
            templates=replace(templates, **paths),
            msa_dir=_resolved(self.options.msa_dir),
            reference=_resolved(self.options.reference),
        )
        return FoldWorker(
            self.output.resolve(),
            weights,
            replace(given, device=device, **files),
            options,
            threads=threads,
            sharers=sharers,
            search=self.search,
            leaves_rest=leaves_rest,
        )

    def _local(self, limits: Limits) -> Workers:
        where = self.where
        device, gpus = self.config.device, 0
        if choose_device(device).type == "cuda":
            gpus = torch.cuda.device_count()
        if ":" in device:
            gpus, devices = 1, [device]
        else:
            devices = [f"cuda:{k}" for k in range(gpus)] or ["cpu"]
        count = where.workers or max(1, gpus)
        if gpus and count > gpus:
            raise ConfigError(f"--workers {count}: each worker needs a separate GPU; available: {gpus}")
        cores = available_cores()
        threads = where.cpus_per_worker or max(1, cores // count)
        memory = None if gpus else host_available_bytes()
        finishers = self._count_finishers(count, memory)
        if memory is not None:
            memory = max(1, memory - finishers * PROCESS_BYTES)
        sharers, leaves_rest = count if gpus else 1, finishers > 0
        functions = [
            self._function(devices[k % len(devices)], threads, sharers, leaves_rest=leaves_rest)
            for k in range(count)
        ]
        adapt: Callable[[FoldWorker], Function] = self.adapt or (lambda function: function)
        workers = [
            (Worker(f"fold-{k}", "fold", memory=memory), adapt(function))
            for k, function in enumerate(functions, 1)
        ]
        finisher = FinishWorker(functions[0], max(1, cores // max(1, finishers)))
        workers += [(Worker(f"finish-{k + 1}", "finish"), finisher) for k in range(finishers)]
        if self.search is not None:
            workers.append((Worker("search-1", "search"), SearchWorker(self.search)))
        text = f"{_counted(count, 'worker')} on this machine, on {'GPUs' if gpus else f'CPUs ({threads} for each)'}"
        return Workers(LocalExecutor(workers, limits), count, not gpus, text, leaves_rest)

    def _count_finishers(self, count: int, memory: int | None) -> int:
        """Return how many workers draw and relax on this machine, whose free host memory is None for GPUs."""
        if not self._has_rest:
            return 0
        if self.config.relax == "none":
            return -(-count // _FOLDERS_OF_PLOTTER)
        cores = available_cores()
        return count if memory is None else count_processes(cores, cores, memory)

    def _on_ray(self, limits: Limits) -> Workers:
        from fastfold.inference.screen.ray_cluster import Group, RayExecutor, connect

        where, device = self.where, self.config.device
        if ":" in device:
            raise ConfigError(f"--device {device}: with --ray the cluster chooses the GPU; use --device cuda")
        found = connect(str(where.ray))
        gpus = 0 if device == "cpu" else found.gpus
        if device == "cuda" and not gpus:
            raise ConfigError("the Ray cluster lacks GPUs; use --device cpu")
        count = where.workers or (gpus or found.machines)
        if gpus:
            cpus = where.cpus_per_worker or 1
        else:
            cpus = where.cpus_per_worker or max(1, min(found.cpus // count, found.smallest))
        if cpus > found.smallest:
            self.say(f"warning: machines with fewer than {cpus} CPUs get no worker")
        sharers = -(-gpus // found.machines) if gpus else 1
        # A worker without a GPU could not relax on one.
        has_finishers = self._has_rest and not gpus
        function = self._function("cuda" if gpus else "cpu", cpus, sharers, leaves_rest=has_finishers)
        folder = function if self.adapt is None else self.adapt(function)
        groups = [Group("fold", count, folder, cpus, 1 if gpus else 0)]
        if has_finishers:
            groups.append(Group("finish", count, FinishWorker(function), 0))
        if self.search is not None:
            # Without own CPUs, because on a cluster full of folds it would wait forever for one.
            groups.append(Group("search", 1, SearchWorker(self.search), int(found.cpus > count * cpus)))
        text = (
            f"{_counted(count, 'worker')} in a Ray cluster of {_counted(found.machines, 'machine')} with "
            f"{_counted(found.cpus, 'CPU')} and {_counted(found.gpus, 'GPU')}"
        )
        return Workers(RayExecutor(groups, limits, self.say), count, not gpus, text, has_finishers)


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


def _resolved(path: Path | None) -> Path | None:
    return None if path is None else path.resolve()


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
