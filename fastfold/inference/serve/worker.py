"""Worker of a server: keeps the networks loaded and folds groups of jobs, each into a folder of its own."""

from __future__ import annotations

import json
import os
import stat
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock

from fastfold.errors import FastFoldError, PlaceError, WeightsError, WriteError
from fastfold.inference.error_messages import debugging, reason
from fastfold.inference.screen.job import JobResult, Task
from fastfold.inference.screen.worker import FoldWorker
from fastfold.inference.serve.request import ANSWER, PROGRESS, RESULTS, JobRequest
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.locks import held

if TYPE_CHECKING:
    import torch

    from fastfold.data.targets import Target
    from fastfold.inference.models import Network

_LOCK = ".lock"


class JobFolder(NamedTuple):
    """Job of a group, as sent to a worker.

    Attributes:
        id: Name of the job.
        path: Its folder, with the request.
    """

    id: str
    path: Path


@dataclass
class GroupWorker:
    """Picklable function that folds groups of jobs; the networks are opened with the first group.

    The answer to a job is a file in its folder, so it outlives the worker and the server.

    Attributes:
        base: Networks, settings, and device of the worker.
    """

    base: FoldWorker
    _opened: tuple[list[Network], torch.device] | None = field(default=None, init=False, repr=False)

    def __call__(self, number: int, task: Task) -> JobResult:
        """Fold a group, one job after the other; an empty one only loads the networks.

        Args:
            number: Number of the group.
            task: Task whose payload is a sequence of :class:`JobFolder`.

        Returns:
            Result, ``fatal`` if no other job could be folded or written either.
        """
        group: Sequence[JobFolder] = task.job.payload
        try:
            if self._opened is None:
                networks, device = self.base.open_networks()
                for network in networks:
                    network.load(self.base.config.precision)
                self._opened = networks, device
            for job in group:
                # The worker of a killed server may end a moment later than its server.
                with held(FileLock(job.path / _LOCK)):
                    if not (job.path / ANSWER).exists():
                        self._fold(job, task.memory)
        except FastFoldError as error:
            return JobResult("fatal", str(error))
        return JobResult("done")

    def _fold(self, job: JobFolder, memory: int | None) -> None:
        """Fold a job and write its answer.

        Raises:
            WriteError, WeightsError: Other jobs would fail too.
        """
        target = None
        try:
            request = JobRequest.read(job.path)
            target = request.target()
            answer = self._run(request, target, job.path, memory)
        except PlaceError as error:
            answer = {"state": "failed", "text": str(error)}
        except (WriteError, WeightsError):
            raise
        except Exception as error:  # also a bug that one target triggers: the others continue
            if debugging():
                traceback.print_exc()
            text = str(error) if target is None else reason(error, target)
            answer = {"state": "failed", "text": text}
        write_answer(job.path, answer)

    def _run(self, request: JobRequest, target: Target, folder: Path, memory: int | None) -> dict[str, Any]:
        from fastfold.data.templates.source import TemplateFinder
        from fastfold.inference.models import limit_networks, suitable
        from fastfold.inference.output.results_folder import ResultsFolder
        from fastfold.inference.progress import Progress
        from fastfold.inference.runner import fold_targets, target_cost
        from fastfold.inference.target_runner import TargetRunner, conclusion

        assert self._opened is not None
        config = request.config(self.base.config)
        if memory is not None:
            config = replace(config, memory_budget=memory)
        options = request.options(self.base.options, folder)
        networks = limit_networks(self._opened[0], options.num_models)
        finder = TemplateFinder(options.templates) if options.templates.wanted else None
        cost = target_cost(target, suitable(networks, target), config)
        results = ResultsFolder(folder / RESULTS)
        # Line by line, so that the server can send each one at once.
        with (
            (folder / PROGRESS).open("a", encoding="utf-8", buffering=1) as log,
            Progress(cost, log) as progress,
        ):
            runner = TargetRunner(
                networks, results, self._opened[1], config, options, progress, finder=finder
            )
            summary = fold_targets(runner, [target], [cost])
        records = results.target(target).records()
        answer: dict[str, Any] = {"state": "done", "scores": {}, "files": result_files(folder)}
        if records:
            best = {name: value for name, value in records[0].scores.items() if name != "model"}
            answer |= {"text": conclusion(records), "scores": best | {"model": records[0].key}}
        if summary.failed:  # predictions that were finished before can be fetched
            answer |= {"state": "failed", "text": summary.failed[0][1]}
        return answer


def write_answer(folder: Path, answer: dict[str, Any]) -> None:
    """Write the answer to a job: its ``state``, a ``text``, and ``scores`` and ``files`` of a folded one.

    Raises:
        WriteError: The file cannot be written.
    """
    write_atomic(folder / ANSWER, json.dumps(answer))


def result_files(folder: Path) -> list[str]:
    """Return the names of the regular files in a job's folder of results, which clients may fetch."""
    try:
        with os.scandir(folder / RESULTS) as entries:
            return sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
            )
    except OSError:
        return []
