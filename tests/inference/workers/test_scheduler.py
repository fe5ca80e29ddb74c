"""The scheduler, with workers that are made up and a clock that stands still unless it is moved."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import pytest

from fastfold.inference.workers.job import (
    Event,
    Finished,
    Gone,
    Job,
    JobResult,
    Ready,
    ScreenError,
    Task,
    Worker,
)
from fastfold.inference.workers.scheduler import MemoryPlan, Scheduler

GIB = 1 << 30
PLAN = MemoryPlan(per_worker=0)

Do = Callable[[Task], JobResult | Gone]


class FakeExecutor:
    """Workers that finish the job that was started first, one for each call of ``wait``.

    Args:
        workers: The workers.
        do: What becomes of a job.
        first: Jobs that are finished before those that were started before them.
    """

    def __init__(self, workers: list[Worker], do: Do | None = None, first: set[int] | None = None) -> None:
        self._do = do or (lambda task: JobResult("done"))
        self._first = first or set()
        self.running: deque[tuple[str, Task]] = deque()
        self.started: list[tuple[str, int]] = []
        self.memory: dict[int, int | None] = {}
        self.most_running = 0
        self.now, self.waits = 0.0, []
        self._news: list[Event] = [Ready(worker) for worker in workers]
        self._kinds = {worker.id: worker.kind for worker in workers}
        self._idle: set[str] = {worker.id for worker in workers}

    def start(self, worker: str, task: Task) -> None:
        assert worker in self._idle, "a worker has one job at a time"
        assert self._kinds[worker] == task.job.kind
        self._idle.discard(worker)
        self.running.append((worker, task))
        self.started.append((worker, task.job.id))
        self.memory[task.job.id] = task.memory
        self.most_running = max(self.most_running, len(self.running))

    def wait(self, timeout: float) -> list[Event]:
        self.waits.append(timeout)
        if self._news:
            news, self._news = self._news, []
            return news
        if not self.running:
            assert timeout > 0, "nothing is going on, and nothing will"
            self.now += timeout
            return []
        chosen = next((one for one in self.running if one[1].job.id in self._first), self.running[0])
        self.running.remove(chosen)
        worker, task = chosen
        self._idle.add(worker)
        outcome = self._do(task)
        if not isinstance(outcome, Gone):
            return [Finished(worker, outcome)]
        self._idle.discard(worker)
        other = worker + "'"
        self._kinds[other] = self._kinds[worker]
        self._idle.add(other)
        self._news = [Ready(Worker(other, self._kinds[worker]))]
        return [Gone(worker, outcome.reason)]

    def close(self) -> None:
        raise AssertionError("the scheduler does not close what it was given")


def fold(number: int, cost: float, *, smallest: int = 0, needs: tuple[int, ...] = ()) -> Job:
    return Job(number, f"target {number}", "fold", None, cost, smallest, frozenset(needs))


def search(number: int, cost: float = 1.0) -> Job:
    return Job(number, f"search {number}", "search", None, cost)


def workers(count: int, *, memory: int | None = None, host: str = "here") -> list[Worker]:
    return [Worker(f"{host}-{k}", "fold", host, memory) for k in range(count)]


def schedule(
    jobs: list[Job], executor: FakeExecutor, memory: MemoryPlan | None = None, ahead: int = 16
) -> dict[int, JobResult]:
    """Every job's result; that there is one for each, once, is checked."""
    results: dict[int, JobResult] = {}

    def report(job: Job, result: JobResult) -> None:
        assert job.id not in results, "reported twice"
        results[job.id] = result

    Scheduler(jobs, executor, report, memory or PLAN, ahead=ahead, clock=lambda: executor.now).run()
    assert set(results) == {job.id for job in jobs}
    return results


def test_jobs_that_cost_most_are_started_first_and_equals_by_number():
    executor = FakeExecutor(workers(2))
    schedule([fold(0, 1), fold(1, 5), fold(2, 3), fold(3, 5), fold(4, 9)], executor)
    assert [job for _, job in executor.started] == [4, 1, 3, 2, 0]


def test_a_worker_gets_a_job_only_when_it_has_none():
    executor = FakeExecutor(workers(3))
    schedule([fold(k, k) for k in range(50)], executor)
    assert executor.most_running == 3


def test_without_jobs_nothing_is_asked_of_the_workers():
    executor = FakeExecutor(workers(1))
    assert schedule([], executor) == {}
    assert executor.waits == []


def test_a_job_whose_worker_is_lost_is_done_by_another():
    lost = {1}

    def do(task: Task) -> JobResult | Gone:
        if task.job.id in lost:
            lost.discard(task.job.id)
            return Gone("", "machine switched off")
        return JobResult("done")

    executor = FakeExecutor(workers(2), do)
    results = schedule([fold(0, 1), fold(1, 2), fold(2, 3)], executor)
    assert {result.status for result in results.values()} == {"done"}
    assert [job for _, job in executor.started].count(1) == 2
    assert any(worker.endswith("'") for worker, _ in executor.started)


@pytest.mark.parametrize("how", ["machine", "process"])
def test_a_job_that_ends_its_worker_twice_is_given_up_and_the_others_go_on(how: str):
    def do(task: Task) -> JobResult | Gone:
        if task.job.id != 1:
            return JobResult("done")
        return Gone("", "killed by SIGSEGV") if how == "machine" else JobResult("lost", "killed by SIGSEGV")

    executor = FakeExecutor(workers(1), do)
    results = schedule([fold(0, 1), fold(1, 2), fold(2, 3)], executor)
    assert [results[k].status for k in range(3)] == ["done", "failed", "done"]
    assert results[1].text == (
        "target 1: its worker ended twice, the last time: killed by SIGSEGV; it is not tried again in this run"
    )
    assert [job for _, job in executor.started] == [2, 1, 1, 0]


def test_a_job_that_failed_for_a_reason_is_not_tried_again():
    executor = FakeExecutor(workers(1), lambda task: JobResult("failed", "too long"))
    results = schedule([fold(0, 1)], executor)
    assert (results[0].text, len(executor.started)) == ("too long", 1)


def test_what_would_fail_everywhere_ends_the_run():
    executor = FakeExecutor(workers(2), lambda task: JobResult("fatal", "the disk is full"))
    with pytest.raises(ScreenError, match="the disk is full"):
        schedule([fold(k, 1) for k in range(10)], executor)
    assert len(executor.started) == 2


def test_a_job_that_another_process_does_is_tried_again_after_growing_delays_until_it_is_there():
    tried: list[float] = []

    def do(task: Task) -> JobResult:
        tried.append(executor.now)
        return JobResult("in_progress" if len(tried) < 8 else "finished")

    executor = FakeExecutor(workers(1), do)
    results = schedule([fold(0, 1)], executor)
    assert results[0].status == "finished"
    assert [b - a for a, b in itertools.pairwise(tried)] == [1, 2, 4, 8, 16, 30, 30]


def test_while_one_job_waits_for_another_process_the_others_are_done():
    def do(task: Task) -> JobResult:
        return JobResult("in_progress") if task.job.id == 9 and executor.now < 1 else JobResult("done")

    executor = FakeExecutor(workers(1), do)
    schedule([fold(9, 9), fold(1, 1), fold(2, 2)], executor)
    assert [job for _, job in executor.started] == [9, 2, 1, 9]


def test_a_fold_waits_for_all_searches_that_it_needs():
    order: list[int] = []

    def do(task: Task) -> JobResult:
        order.append(task.job.id)
        return JobResult("done")

    executor = FakeExecutor([*workers(1), Worker("s", "search")], do)
    schedule([search(-1, 5), search(-2, 4), fold(0, 9, needs=(-1, -2)), fold(1, 1, needs=(-1,))], executor)
    assert order.index(0) > max(order.index(-1), order.index(-2))
    assert order[0] == -1


def test_folds_whose_search_failed_fail_with_its_reason_and_others_are_done():
    executor = FakeExecutor(
        [*workers(1), Worker("s", "search")],
        lambda task: JobResult("failed", "no such database") if task.job.id == -1 else JobResult("done"),
    )
    jobs = [search(-1), search(-2), fold(0, 9, needs=(-1, -2)), fold(1, 1, needs=(-2,))]
    results = schedule(jobs, executor)
    assert results[0] == JobResult("failed", "target 0: search -1: no such database")
    assert results[1].status == "done"
    assert 0 not in [job for _, job in executor.started]


def test_searches_pause_while_enough_folds_wait():
    """A slow fold worker and a fast search: what was searched does not pile up beyond the bound."""
    waiting: list[int] = []
    searched: set[int] = set()
    begun: set[int] = set()

    def do(task: Task) -> JobResult:
        (searched if task.job.kind == "search" else begun).add(abs(task.job.id))
        waiting.append(len(searched - begun))
        return JobResult("done")

    number, ahead = 30, 4
    jobs = [search(-k, number - k) for k in range(1, number + 1)]
    jobs += [fold(k, number - k, needs=(-k,)) for k in range(1, number + 1)]
    executor = FakeExecutor(
        [*workers(1), Worker("s", "search")], do, first={-k for k in range(1, number + 1)}
    )
    schedule(jobs, executor, ahead=ahead)
    assert max(waiting) <= ahead + 2  # those that wait, the one being folded, and the one being searched
    assert max(waiting) >= ahead


def test_folds_that_need_no_search_do_not_hold_searches_up():
    executor = FakeExecutor([*workers(1), Worker("s", "search")])
    jobs = [*(fold(k, 1) for k in range(20)), search(-1), fold(20, 9, needs=(-1,))]
    schedule(jobs, executor, ahead=1)
    assert [job for _, job in executor.started][1] == -1


def test_workers_of_a_machine_share_its_memory_in_equal_parts():
    executor = FakeExecutor(workers(4, memory=40 * GIB))
    schedule([fold(k, 1) for k in range(8)], executor)
    assert set(executor.memory.values()) == {9 * GIB}  # of nine tenths
    assert executor.most_running == 4


def test_a_job_that_needs_more_than_its_part_gets_that_and_smaller_ones_fill_what_is_left():
    executor = FakeExecutor(workers(4, memory=40 * GIB))
    running: list[set[int]] = []

    def do(task: Task) -> JobResult:
        running.append({other.job.id for _, other in executor.running} | {task.job.id})
        return JobResult("done")

    executor._do = do
    jobs = [fold(0, 9, smallest=20 * GIB), fold(1, 8, smallest=25 * GIB), *(fold(k, 1) for k in range(2, 8))]
    schedule(jobs, executor)
    assert (executor.memory[0], executor.memory[1]) == (20 * GIB, 25 * GIB)
    assert not any({0, 1} <= together for together in running), "45 of 36 GiB"
    assert any(0 in together and len(together) == 2 for together in running)


def test_a_job_that_needs_more_than_there_is_gets_all_of_it_alone():
    executor = FakeExecutor(workers(2, memory=40 * GIB))
    schedule([fold(0, 9, smallest=99 * GIB), fold(1, 1)], executor)
    assert executor.memory == {0: 36 * GIB, 1: 18 * GIB}
    assert executor.most_running == 1


def test_a_budget_of_the_user_is_every_jobs_and_limits_how_many_run_together():
    executor = FakeExecutor(workers(4, memory=40 * GIB))
    schedule(
        [fold(k, 1, smallest=30 * GIB) for k in range(6)],
        executor,
        MemoryPlan(per_worker=0, budget=15 * GIB),
    )
    assert set(executor.memory.values()) == {15 * GIB}
    assert executor.most_running == 2


def test_a_budget_larger_than_the_machine_is_used_by_one_job_at_a_time():
    executor = FakeExecutor(workers(2, memory=4 * GIB))
    schedule([fold(0, 1), fold(1, 1)], executor, MemoryPlan(per_worker=0, budget=15 * GIB))
    assert set(executor.memory.values()) == {15 * GIB}
    assert executor.most_running == 1


def test_machines_have_memory_of_their_own_and_gpus_take_none_of_it():
    small, large = workers(1, memory=10 * GIB, host="small"), workers(2, memory=80 * GIB, host="large")
    executor = FakeExecutor([*small, *large])
    schedule([fold(k, 1) for k in range(3)], executor)
    given = {worker.split("-")[0]: executor.memory[job] for worker, job in executor.started}
    assert given == {"small": 9 * GIB, "large": 36 * GIB}
    executor = FakeExecutor(workers(2))
    schedule([fold(0, 1, smallest=GIB)], executor)
    assert executor.memory == {0: None}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_job_ends_once(seed: int):
    """Random losses, failures and other processes; ``schedule`` checks that each job is reported once."""
    import random

    rng = random.Random(seed)

    def do(task: Task) -> JobResult | Gone:
        kind = rng.choice(["done", "done", "finished", "in_progress", "failed", "lost", "gone"])
        return Gone("", "gone") if kind == "gone" else JobResult(kind, kind)

    jobs = [search(-k, rng.random()) for k in range(1, 10)]
    jobs += [
        fold(k, rng.random(), smallest=rng.randrange(20) * GIB, needs=tuple(rng.sample(range(-9, 0), 2)))
        for k in range(40)
    ]
    team = [*workers(3, memory=20 * GIB), *workers(2, host="gpu"), Worker("s", "search")]
    results = schedule(jobs, FakeExecutor(team, do), MemoryPlan(per_worker=GIB), rng.randrange(1, 9))
    assert {result.status for result in results.values()} <= {"done", "finished", "failed"}


def group(number: int, *members: Job) -> Job:
    """One job for several, with the prerequisites of the first."""
    cost = sum(job.cost for job in members)
    return Job(number, f"group {number}", "fold", None, cost, needs=members[0].needs, members=members)


def results_of_group(job: Job, do: Do, jobs: tuple[Job, ...], needs: list[Job]) -> dict[int, JobResult]:
    """Every member's result, with another job that is done alone."""
    results: dict[int, JobResult] = {}

    def report(one: Job, result: JobResult) -> None:
        assert one.id not in results, "reported twice"
        results[one.id] = result

    kinds = [*workers(2), Worker("s", "search")]
    Scheduler([job, *needs, fold(9, 1.0)], FakeExecutor(kinds, do), report, PLAN).run()
    assert set(results) == {9, *(one.id for one in (*jobs, *needs))}
    return results


def test_members_of_a_group_have_results_of_their_own() -> None:
    def do(task: Task) -> JobResult:
        if not task.job.members:
            return JobResult("done")
        return JobResult("done", seconds=6.0, members=(JobResult("done", "a"), JobResult("failed", "b")))

    members = (fold(1, 2.0), fold(2, 2.0))
    results = results_of_group(group(5, *members), do, members, [])
    assert results[1] == JobResult("done", "a", seconds=3.0)
    assert results[2] == JobResult("failed", "b", seconds=3.0)


@pytest.mark.parametrize("outcome", [Gone("", "killed"), JobResult("lost"), JobResult("failed", "limit")])
def test_members_of_a_group_without_results_are_done_alone(outcome: JobResult | Gone) -> None:
    members = (fold(1, 2.0), fold(2, 2.0))
    tried: list[int] = []

    def do(task: Task) -> JobResult | Gone:
        tried.append(task.job.id)
        return outcome if task.job.members else JobResult("done")

    results = results_of_group(group(5, *members), do, members, [])
    assert {result.status for result in results.values()} == {"done"}
    assert sorted(tried) == [1, 2, 5, 9]


def test_a_failed_search_fails_each_member_of_a_group_by_name() -> None:
    members = (fold(1, 2.0, needs=(-1,)), fold(2, 2.0, needs=(-1,)))

    def do(task: Task) -> JobResult:
        return JobResult("failed", "no database") if task.job.kind == "search" else JobResult("done")

    results = results_of_group(group(5, *members), do, members, [search(-1)])
    assert results[2].text == "target 2: search -1: no database"
    assert results[1].text == "target 1: search -1: no database"


def test_a_folded_target_is_finished_by_another_worker_and_reported_once() -> None:
    lost = {12}

    def do(task: Task) -> JobResult | Gone:
        if task.job.id in lost:
            lost.discard(task.job.id)
            return Gone("", "killed")
        return JobResult("failed" if task.job.id == 1 else "done", str(task.job.payload))

    def follow(job: Job, result: JobResult) -> Job | None:
        if job.kind != "fold" or result.status == "failed":
            return None
        return Job(10 + job.id, job.name, "finish", "rest", job.cost)

    group = Job(3, "group", "fold", None, 5.0, members=(fold(0, 2), fold(2, 3)))
    executor = FakeExecutor([*workers(1), Worker("finish-1", "finish")], do)
    results: dict[int, JobResult] = {}
    Scheduler(
        [group, fold(1, 4)],
        executor,
        lambda job, result: results.setdefault(job.id, result),
        PLAN,
        follow=follow,
        clock=lambda: executor.now,
    ).run()
    assert {number: (one.status, one.text) for number, one in results.items()} == {
        1: ("failed", "None"),
        10: ("done", "rest"),
        12: ("done", "rest"),
    }
    assert [number for _, number in executor.started].count(12) == 2
