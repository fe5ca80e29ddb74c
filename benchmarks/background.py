"""Share of a run in which its slowest stage idles, with plots and relaxation in the background and between the folds.

Usage: python benchmarks/background.py [--targets 20] [--residues 40] [--relax] [--screen] [--inline] [--json FILE]

``fastfold infer`` folds random sequences by ``mini``. The stages are folds, and plots with relaxation in one or more
processes. The slower one would be busy from the first fold to the end of the last target, if nothing waited.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

if __name__ == "__main__":  # not in its workers, which import this file as they import the command
    from fastfold.inference.config import InferConfig
    from fastfold.inference.folding.background import Background, BackgroundWork, start_ahead

    start_ahead(InferConfig(relax="best" if "--relax" in sys.argv else "none"))  # as fastfold infer does

    import numpy as np

    from fastfold.inference.folding.batch import BatchFolder
    from fastfold.inference.request import InferRequest, RunOptions
    from fastfold.inference.runner import Summary, run
    from fastfold.inference.target_runner import TargetRunner
    from fastfold.inference.workers.job import JobResult, Task
    from fastfold.inference.workers.options import ScreenOptions
    from fastfold.inference.workers.run import screen
    from fastfold.inference.workers.worker_process import WorkerProcess
    from fastfold.protein.residue_constants import restypes


def measure(options: argparse.Namespace, *, inline: bool) -> dict[str, float]:
    """Return the seconds of each stage, those from the first fold to the end, and the slowest stage's idle share."""
    folds: list[tuple[float, float]] = []
    predict, fold_groups, start = BatchFolder.predict, TargetRunner.fold_groups, Background._start
    call, other, ended, processes = BackgroundWork.run, 0.0, 0.0, 1
    submitted = Background._call

    def timed(self: BatchFolder, requests: Any) -> Any:
        began = time.perf_counter()
        try:
            return predict(self, requests)
        finally:
            folds.append((began, time.perf_counter()))

    def worked(run: Any, *arguments: Any) -> Any:
        nonlocal other
        began = time.perf_counter()
        try:
            return run(*arguments)
        finally:
            other += time.perf_counter() - began

    def watched(self: TargetRunner, groups: Any) -> Any:
        nonlocal ended, processes
        if inline:
            self.background = None
        if self.background is not None:
            processes = self.background.processes
        yield from fold_groups(self, groups)
        ended = time.perf_counter()

    BatchFolder.predict, TargetRunner.fold_groups = timed, watched  # type: ignore[method-assign]
    if inline:
        Background._start = lambda self: None  # type: ignore[method-assign]
        BackgroundWork.run = lambda self: worked(call, self)  # type: ignore[method-assign]
    else:
        Background._call = lambda self, work: worked(submitted, self, work)  # type: ignore[method-assign]
    try:
        run_targets(options, run)
    finally:
        BatchFolder.predict, TargetRunner.fold_groups = predict, fold_groups  # type: ignore[method-assign]
        Background._start, Background._call = start, submitted  # type: ignore[method-assign]
        BackgroundWork.run = call  # type: ignore[method-assign]
    whole = ended - folds[0][0]
    folding = sum(end - begin for begin, end in folds)
    busy = max(folding, other / processes)
    return {
        "folds": folding,
        "other": other,
        "processes": processes,
        "whole": whole,
        "idle": 1 - busy / whole,
    }


def measure_screen(options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of :func:`measure` for ``fastfold screen`` with one worker that folds.

    A job ends with its answer, and the first of each worker includes the start of its process.
    """
    jobs: list[tuple[str, str, float, float]] = []
    original = WorkerProcess.run

    def timed(self: WorkerProcess, task: Task) -> JobResult:
        began = time.perf_counter()
        result = original(self, task)
        jobs.append((threading.current_thread().name, task.job.kind, began, time.perf_counter()))
        return result

    def folded(request: InferRequest) -> Summary:
        return screen(request, ScreenOptions(workers=1))

    WorkerProcess.run = timed  # type: ignore[method-assign]
    try:
        run_targets(options, folded)
    finally:
        WorkerProcess.run = original  # type: ignore[method-assign]
    whole = max(end for *_, end in jobs) - min(begin for *_, begin, _ in jobs)
    seconds = {
        kind: sum(end - begin for _, of, begin, end in jobs if of == kind) for kind in ("fold", "finish")
    }
    processes = len({name for name, kind, *_ in jobs if kind == "finish"})
    busy = max(seconds["fold"], seconds["finish"] / processes)
    return {
        "folds": seconds["fold"],
        "other": seconds["finish"],
        "processes": processes,
        "whole": whole,
        "idle": 1 - busy / whole,
    }


def run_targets(options: argparse.Namespace, command: Any) -> None:
    """Fold random targets by a command."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        fasta = Path(folder) / "targets.fasta"
        fasta.write_text(
            "".join(
                f">t{number}\n{''.join(random.choice(restypes, options.residues))}\n"
                for number in range(options.targets)
            )
        )
        config = InferConfig(device="cpu", relax="best" if options.relax else "none")
        found = command(InferRequest([fasta], Path(folder) / "out", (), config, RunOptions(quiet=True)))
        assert len(found.folded) == options.targets, found.failed


def main() -> None:
    """Print the shares of both ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", type=int, default=20)
    parser.add_argument("--residues", type=int, default=40)
    parser.add_argument("--relax", action="store_true", help="relax every target too")
    parser.add_argument("--screen", action="store_true", help="measure fastfold screen too")
    parser.add_argument("--inline", action="store_true", help="measure the run without a background too")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    results = {}
    if options.screen:
        results["screen"] = measure_screen(options)
    for inline in (False, True)[: 1 + options.inline]:
        name = "between the folds" if inline else "in the background"
        results[name] = measure(options, inline=inline)
    for name, found in results.items():
        line = "{folds:.1f} s of folds, {other:.1f} s of other work by {processes}, {whole:.1f} s, {idle:.1%} idle"
        print(f"{name}: {line.format(**found)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
