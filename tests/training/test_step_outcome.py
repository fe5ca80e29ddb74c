"""What processes say of a step: means in the order of the ranks, one transfer, and which samples were not finite."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastfold.parallel import DistributedContext, ParallelMesh, ParallelPlan
from fastfold.training.step_outcome import (
    BusyTimer,
    PendingStep,
    RunProgress,
    StepOutcome,
    StepSamples,
    straggling,
)
from tests.helpers.spawn_ranks import BACKENDS, launch

KEYS = ["loss", "gradient_norm"]


def _numbers(loss: float, norm: float = 1.0) -> dict[str, Tensor]:
    return {"loss": torch.tensor(loss), "gradient_norm": torch.tensor(norm, dtype=torch.float64)}


def _share(rank: int, *losses: float) -> StepSamples:
    share = StepSamples(batch=4, signal=15 if rank == 1 else 0)
    for number, loss in enumerate(losses):
        share.add(f"sample {rank}.{number}", _numbers(loss), residues=10 + rank)
    share.waited_s, share.flops, share.counted = rank / 10, 100.0 * rank, 10
    share.busy_s = 1.0 + rank
    return share


def _of_ranks(bad: bool) -> tuple[dict[str, float], int, bool, bool, list[str]]:
    """Two parts of the samples with two DAP ranks each, of which the last rank saw something that is not finite."""
    rank = dist.get_rank()
    mesh = ParallelMesh(ParallelPlan(dp=2, dap=2))
    context = DistributedContext(rank, 4, torch.zeros(()).device, mesh, dist.new_group(backend="gloo"))
    share = _share(rank, 0.5 + rank // 2, math.nan if bad and rank == 3 else 0.25)
    outcome = StepOutcome(share, KEYS, context, {"lr": 0.125})
    outcome.add("early", torch.tensor(3.0))
    outcome.start_copy()
    outcome.add("late", torch.tensor(4.0))
    return *outcome.read(), bool(outcome.ok), share.bad_names()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [False, True])
def test_all_ranks_read_the_same(bad: bool, backend: str) -> None:
    found = launch(_of_ranks, 4, bad, backend=backend)
    for rank, (numbers, signal, finite, ok, names) in enumerate(found):
        assert signal == 15
        assert finite == ok == (not bad)
        assert names == (["sample 3.1"] if bad and rank == 3 else [])
        # Ranks 0 and 2 speak for those that work on the same samples.
        assert numbers["loss"] == pytest.approx((0.5 + 0.25 + 1.5 + 0.25) / 4)
        assert numbers["gradient_norm"] == 1.0
        assert (numbers["residues"], numbers["waited_s"]) == (2 * 10 + 2 * 12, 0.2)
        assert (numbers["flops"], numbers["counted"]) == (600.0, 40 / 92)
        assert (numbers["busy_s"], numbers["straggling"], numbers["slowest_rank"]) == (2.5, 1.6, 3)
        assert (numbers["lr"], numbers["early"], numbers["late"]) == (0.125, 3.0, 4.0)


def test_a_process_alone_needs_no_group_and_names_what_was_not_finite() -> None:
    context = DistributedContext(0, 1, torch.device("cpu"))
    share = _share(0, 1.0, 2.0)
    share.add("endless", _numbers(1.0, math.inf), residues=10)
    numbers, signal, finite = StepOutcome(share, KEYS, context, {}).read()
    assert (signal, finite, share.bad_names()) == (0, False, ["endless"])
    assert numbers["loss"] == 1.0
    assert math.isinf(numbers["gradient_norm"])


def test_straggling_is_the_longest_time_by_the_mean_of_processes_that_all_know_theirs() -> None:
    assert straggling([1.0, 3.0]) == {"busy_s": 2.0, "straggling": 1.5, "slowest_rank": 1.0}
    assert straggling([2.0]) == {}
    assert straggling([0.0, 3.0]) == {}


def test_time_of_computing_is_known_in_the_step_after_and_counts_no_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 12.5, 20.0, 21.0, 30.0])
    monkeypatch.setattr("fastfold.training.step_outcome.time.perf_counter", lambda: next(clock))
    timer = BusyTimer(torch.device("cpu"))
    seen = []
    for _ in range(2):
        timer.start()
        timer.stop()
        seen.append(timer.seconds)
    timer.start()
    assert [*seen, timer.seconds] == [0.0, 2.5, 1.0]


def test_events_are_recorded_on_the_device_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several GPUs, the current one may be another, whose stream is empty."""
    recorded: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object = None) -> None:
            recorded.append(stream)

        def query(self) -> bool:
            return True

        def elapsed_time(self, last: Event) -> float:
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    timer = BusyTimer(torch.device("cuda:1"))
    timer.start()
    timer.stop()
    timer.start()
    assert recorded == ["stream of cuda:1"] * 3
    assert timer.seconds == 1.5


def test_a_pending_step_commits_to_a_clean_count_or_rolls_its_counters_back() -> None:
    outcome = StepOutcome(_share(0, 1.0), KEYS, DistributedContext(0, 1, torch.device("cpu")), {})
    progress, reverted = RunProgress(step=7), []
    PendingStep(outcome, 7, 28, 0.0, lambda: reverted.append(7)).rollback(progress, ["a", "b"])
    assert (progress.skipped, progress.bad_in_a_row, progress.bad_samples) == (1, 1, [(7, "a"), (7, "b")])
    assert reverted == [7]
    PendingStep(outcome, 8, 32, 0.0, lambda: reverted.append(8)).commit(progress)
    assert (progress.skipped, progress.bad_in_a_row, reverted) == (1, 0, [7])
