"""``fastfold screen`` on small networks: every target once, whatever happens to workers and to the run itself."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.inference.output.summary import read_table
from fastfold.inference.workers.job import FoldedJob, Job, JobResult, Task
from fastfold.inference.workers.run import _Screen
from fastfold.inference.workers.scheduler import MAX_LOSSES
from fastfold.inference.workers.worker_process import WorkerProcess
from tests.helpers import sequence_databases
from tests.helpers.command_line import QUICK, CommandLine, Outcome
from tests.helpers.screens import (
    descendants,
    leftovers,
    predictions,
    random_targets,
    runs,
    wait_for,
    workers_of,
)


def screen(cli: CommandLine, *arguments: str | Path) -> Outcome:
    """The command in this process, into the folder of the command line, with one network."""
    return cli.run("screen", *arguments, *QUICK, "--weights", cli.weights(), "--out", cli.out)


@pytest.mark.slow
def test_two_workers_of_which_one_is_killed_fold_every_target_once(cli: CommandLine):
    targets = random_targets(3)
    fasta = cli.fasta({**targets, "bad": "MK1"})
    killed: list[int] = []

    def kill() -> None:
        """When the first prediction is there, kill one of the workers."""
        wait_for(lambda: bool(list(cli.out.glob("*.pdb"))))
        killed.extend(workers_of(os.getpid())[:1])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    done = screen(cli, fasta, "--workers", "2", "--seeds", "0-3")
    thread.join()
    assert killed
    assert (done.code, done.out) == (1, f"3 folded, 1 failed; open {cli.out / 'report.html'}\n"), done.err
    assert "digit '1'" in done.err
    assert sorted(predictions(cli.out)) == sorted((name, seed) for name in targets for seed in range(4))
    assert len(read_table(cli.out / "summary.tsv")) == 12
    assert not leftovers(cli.out)
    (listed,) = (cli.out / "failures.tsv").read_text().splitlines()[1:]
    assert listed.startswith("bad\t")
    assert (cli.out / "report.html").exists()

    again = screen(cli, fasta, "--workers", "1", "--seeds", "0-3", "--time-limit", "10m")
    assert again.out == f"0 folded, 3 finished before, 1 failed; open {cli.out / 'report.html'}\n"


@pytest.mark.slow
def test_targets_are_drawn_although_workers_that_draw_are_killed(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    """Once for one target, and each time for another, whose fold is kept for the next run."""
    targets = random_targets(3)
    once, always, _ = targets
    arguments = (cli.fasta(targets), "--workers", "1", "--num-recycles", "0", "--weights", cli.weights())
    kills = dict.fromkeys(targets, 0)
    run_task = WorkerProcess._run_task

    def run(self: WorkerProcess, task: Task) -> JobResult:
        name = task.job.name
        if task.job.kind == "finish" and (name == always or (name == once and not kills[once])):
            kills[name] += 1
            self._process.kill()
        return run_task(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "_run_task", run)
        done = cli.run("screen", *arguments, "--out", cli.out)
    assert kills == {once: 1, always: MAX_LOSSES, _: 0}
    assert (done.code, done.out) == (1, f"2 folded, 1 failed; open {cli.out / 'report.html'}\n"), done.err
    assert f"{always}: its worker ended twice, the last time: killed by SIGKILL" in done.err
    (listed,) = (cli.out / "failures.tsv").read_text().splitlines()[1:]
    assert listed.startswith(f"{always}\t")
    assert sorted(predictions(cli.out)) == sorted((name, 0) for name in targets)
    assert {path.name.partition("_rank_")[0] for path in cli.out.glob("*.png")} == {*targets} - {always}
    before = finished_files(cli.out)

    again = cli.run("screen", *arguments, "--out", cli.out)
    assert again.out == f"1 folded, 2 finished before; open {cli.out / 'report.html'}\n", again.err
    assert {path.name.partition("_rank_")[0] for path in cli.out.glob("*.png")} == {*targets}
    assert finished_files(cli.out) == before, "folds are not written again"
    assert not (cli.out / "failures.tsv").exists()
    assert not leftovers(cli.out)


@pytest.mark.long
def test_a_target_beyond_its_memory_is_refused_and_listed_and_others_are_folded(cli: CommandLine):
    """The budget of all folds is less than the long target's smallest plan."""
    fasta = cli.fasta({"short": "MKTAYIAKQR", "long": "MKTAYIAKQR" * 300})
    done = screen(cli, fasta, "--memory-budget", "100MiB")
    assert (done.code, done.out) == (1, f"1 folded, 1 failed; open {cli.out / 'report.html'}\n"), done.err
    (line,) = (cli.out / "failures.tsv").read_text().splitlines()[1:]
    assert line.startswith("long\t")
    assert "too small for 3,000 residues" in line
    assert len(predictions(cli.out)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no targets given"),
        (["--baits", "a.fasta"], "--baits and --candidates need each other"),
        (["a.fasta", "--homodimers"], "--homodimers needs --all-vs-all"),
        (["a.fasta", "--proteins", "b.fasta"], "--proteins belongs to a table of partners"),
        (["a.fasta", "--workers", "0"], "'0' is not a whole number from 1"),
        (["a.fasta", "--shard", "3/2"], "write I/N"),
        (["a.fasta", "--time-limit", "soon"], "not a length of time"),
        (["a.fasta", "--memory-limit", "1MiB"], "--memory-limit: an idle worker takes"),
        (["a.fasta", "--ray", "ray://head:10001"], "run the command on a machine of the cluster"),
        (["a.fasta", "--ray", "auto", "--device", "cuda:1"], "the cluster chooses the GPU"),
        (["a.fasta", "--device", "cuda:99"], "CUDA"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_started(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    monkeypatch.chdir(cli.folder)
    cli.fasta({"T1": "MKTAYIAKQR"}, "a.fasta")
    cli.fasta({"T2": "MKTAYIAKQR"}, "b.fasta")
    done = screen(cli, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not predictions(cli.out)


@pytest.mark.slow
def test_chains_are_searched_before_their_targets_are_folded_and_templates_are_shown(cli: CommandLine):
    """Two proteins and their pair; a structure that was folded before is a template of the next screen."""
    chains = sequence_databases.queries(2)
    database = sequence_databases.write_database(cli.folder / "uniref90.fasta", chains)
    fasta = cli.fasta(chains)
    done = screen(cli, fasta, "--all-vs-all", fasta, "--db", database, "--cpu", "1", "--workers", "2")
    assert (done.code, done.out) == (0, f"3 folded; open {cli.out / 'report.html'}\n"), done.err
    rows = {target: cli.config(target)["alignment_rows"] for target in ("q0", "q1", "q0_and_q1")}
    assert rows["q0_and_q1"] == [*rows["q0"], *rows["q1"]]
    assert all(row[0] > 5 for target in rows.values() for row in target)
    searched = list(cli.out.glob("alignments/.searches/*/*/uniref90-*"))
    assert len(searched) == 2

    structure = next(cli.out.glob("q0_rank_001_*.cif"))
    again = screen(cli, fasta, "--db", database, "--cpu", "1", "--templates", structure)
    assert (again.code, again.out) == (0, f"1 folded, 1 finished before; open {cli.out / 'report.html'}\n"), (
        again.err
    )
    assert len(list(cli.out.glob("alignments/.searches/*/*/uniref90-*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local", "ray"])
def test_forty_targets_are_folded_once_although_a_worker_and_then_the_run_are_killed(
    cli: CommandLine, ended: list, where: str
):
    if where == "ray":
        pytest.importorskip("ray")
    targets = random_targets(40)
    fasta, weights = cli.fasta(targets), cli.weights()
    arguments = ["screen", fasta, "--workers", "2", "--num-recycles", "10", "--no-plots"]
    arguments += ["--weights", weights, "--out", cli.out, *(["--ray", "local"] if where == "ray" else [])]
    # Ray's workers give way to everything else otherwise, which on a busy machine takes them very long.
    environment = {"RAY_worker_niceness": "0"}
    # Ray's many processes keep the pipes of their driver open, so that what it prints goes to files.
    first_log, second_log = cli.folder / "first.txt", cli.folder / "second.txt"

    with first_log.open("w") as log:
        driver = cli.start(*arguments, stdout=log, stderr=log, env=environment)
    ended.append(driver)
    wait_for(lambda: len(list(cli.out.glob("*.pdb"))) >= 4 or driver.poll() is not None, 900)
    assert driver.poll() is None, first_log.read_text()
    victim = workers_of(driver.pid)[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not runs(victim))
    wait_for(lambda: len(list(cli.out.glob("*.pdb"))) >= 12 or driver.poll() is not None, 900)
    assert driver.poll() is None, first_log.read_text()
    below = descendants(driver.pid)
    driver.kill()
    driver.wait()
    wait_for(lambda: not any(map(runs, below)))

    before = finished_files(cli.out)
    # A prediction that was written in full and not yet put into its place is put there by the next run.
    number = len(before.keys() | {path.parent.name for path in cli.out.glob(".fastfold/*/*.new")})
    assert 12 <= number < 40
    with second_log.open("w") as log:
        driver = cli.start(*arguments, stdout=log, stderr=log, env=environment)
    ended.append(driver)
    driver.wait()
    last = second_log.read_text().splitlines()[-1]
    assert driver.returncode == 0, second_log.read_text()
    assert last == f"{40 - number} folded, {number} finished before; open {cli.out / 'report.html'}"
    assert sorted(predictions(cli.out)) == sorted((name, 0) for name in targets)
    after = finished_files(cli.out)
    assert len(after) == 40
    assert {name: after[name] for name in before} == before, "what was finished is not written again"
    assert not leftovers(cli.out)
    folded = [line.split()[1] for log in (first_log, second_log) for line in reported(log)]
    assert len(folded) == len(set(folded)), "no target is reported as folded twice"


def finished_files(out: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the structure of each prediction that is finished, by the name of its target."""
    found = {}
    for target in out.glob(".fastfold/*/target.json"):  # folders of half-written predictions have none
        if any(path != target for path in target.parent.glob("*.json")):
            (structure,) = out.glob(f"{target.parent.name}_rank_*.pdb")
            status = structure.stat()
            found[target.parent.name] = (status.st_ino, status.st_mtime_ns)
    return found


def reported(log: Path) -> list[str]:
    """The lines of a run that report a folded target."""
    return [line for line in log.read_text().splitlines() if " pLDDT " in line]


class _Results:
    """Notes what becomes of targets, in place of a folder and a display of progress."""

    def __init__(self) -> None:
        self.folded: list[str] = ["earlier"]
        self.skipped: list[str] = ["a", "b"]
        self.failed: list[tuple[str, str]] = [("c", "")]
        self.notes: list[tuple[Any, ...]] = []
        self.folder = SimpleNamespace(target=lambda target: f"folder of {target.name}")
        self.summary = SimpleNamespace(update=lambda place: self.note("update", place))
        self.progress = SimpleNamespace(
            line=lambda text, important=False: self.note("line", text, important),
            skip=lambda cost: self.note("skip", cost),
            step=lambda *values: self.note("step", *values),
        )

    def note(self, *values: Any) -> None:
        self.notes.append(values)

    def add(self, name: str, predictions: tuple[str, ...], *, made: bool) -> None:
        self.note("add", name, predictions, made)

    def fail(self, name: str, reason: str, cost: float) -> None:
        self.note("fail", name, reason, cost)


def test_a_result_of_a_worker_is_reported_by_its_kind() -> None:
    """The fifth of nine targets; the seconds of a fold and of what finishes it are added."""
    target, results = SimpleNamespace(name="t"), _Results()
    one: Any = _Screen([target] * 9, [1.0] * 9, results)  # type: ignore[list-item, arg-type]
    fold = Job(4, "t", "fold", target, 2.5)
    finish = Job(22, "t", "finish", FoldedJob(target, JobResult("done", seconds=61.0)), 2.5)

    def notes(job: Job, result: JobResult) -> list[tuple[Any, ...]]:
        results.notes.clear()
        one._report(job, result)
        return list(results.notes)

    added = [("update", "folder of t"), ("add", "t", ("p",), True)]
    done = JobResult("done", "pLDDT 80", ("a line",), seconds=4.0, predictions=("p",))
    line = ("line", "a line", True)
    assert notes(fold, done) == [line, *added, ("step", "5/9 t", "pLDDT 80, 0:04", 2.5)]
    assert notes(finish, done) == [line, *added, ("step", "5/9 t", "pLDDT 80, 1:05", 2.5)]
    assert notes(fold, JobResult("failed", "why")) == [("fail", "t", "why", 2.5)]
    assert notes(fold, JobResult("finished", predictions=("p",))) == [
        ("update", "folder of t"),
        ("add", "t", ("p",), False),
        ("skip", 2.5),
        ("line", "5/9 t: finished before with the same input and settings, skipped", False),
    ]
    search = Job(1, "s", "search", (), 1.0)
    assert notes(search, JobResult("done")) == []
    assert notes(search, JobResult("failed", "why")) == [("line", "error: s: why", True)]


@pytest.mark.parametrize(("count", "ahead"), [(1, 16), (4, 16), (5, 20), (9, 36)])
def test_four_targets_a_worker_are_searched_ahead(
    count: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def scheduler(*_: Any, ahead: int, **others: Any) -> SimpleNamespace:
        seen.append(ahead)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr("fastfold.inference.workers.run.Scheduler", scheduler)
    executor = SimpleNamespace(close=lambda: None)
    workers = SimpleNamespace(executor=executor, count=count, text="", on_cpu=True, are_finished=False)
    setup: Any = SimpleNamespace(memory_plan=int, start=lambda: workers, jobs=lambda *_, **settings: [])
    progress = SimpleNamespace(line=lambda *_, **settings: None)
    results: Any = SimpleNamespace(progress=progress, kept=nullcontext, finish=lambda *, has_page: has_page)
    assert _Screen([], [], results).run(setup) is True
    assert seen == [ahead]


def test_folded_targets_are_finished_by_other_workers() -> None:
    """Numbers of their jobs are behind those of targets and of groups."""
    one: Any = _Screen([SimpleNamespace(name="t")] * 9, [1.0] * 9, _Results())  # type: ignore[list-item, arg-type]
    fold, result = Job(4, "t", "fold", "target", 2.5), JobResult("done")
    assert one._rest(fold, result) == Job(22, "t", "finish", FoldedJob("target", result), 2.5)
    assert one._rest(fold, JobResult("failed")) is None
    assert one._rest(Job(1, "s", "search", (), 1.0), result) is None
    assert one._rest(Job(22, "t", "finish", (), 1.0), result) is None
