"""The loader: order, state, replay, failures, and processes that die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.loading.loader import SampleLoader, draw_rng, merge_states
from fastfold.errors import ConfigError, InputError
from tests.conftest import REPOSITORY
from tests.helpers.loader_samples import (
    Deadly,
    Slow,
    all_kinds,
    blocked_signals,
    fails_at_first,
    fails_for,
    numbered,
    slowly,
)
from tests.helpers.signals import interruptible


def cycle(*entries: str):  # type: ignore[no-untyped-def]
    return lambda number: entries[number % len(entries)]


def numbers(loader: SampleLoader, count: int) -> list[int]:
    return [next(loader).number for _ in range(count)]


def test_samples_do_not_depend_on_the_workers() -> None:
    """Same draws, same bits, in process and with workers; a single entry serves more workers than it."""
    with SampleLoader(numbered, cycle("only"), workers=0) as plain:
        expected = [next(plain) for _ in range(6)]
    with SampleLoader(numbered, cycle("only"), workers=4, prefetch=2) as parallel:
        for draw in expected:
            other = next(parallel)
            assert (other.number, other.id) == (draw.number, "only")
            np.testing.assert_array_equal(other.sample["noise"], draw.sample["noise"])
            assert other.sample["noise"].flags.writeable


def test_arrays_of_all_kinds_arrive_as_they_are() -> None:
    """Larger than the pipe's pieces, not contiguous, empty: the same values, types and shapes, and writable."""
    with SampleLoader(all_kinds, ["x"], workers=1) as loader:
        sample = next(loader).sample
    expected = all_kinds(0, "x")
    assert sample.keys() == expected.keys()
    for name, value in expected.items():
        assert sample[name].dtype == value.dtype
        assert sample[name].flags.writeable
        np.testing.assert_array_equal(sample[name], value)


def test_draw_rng_depends_on_each_of_its_numbers() -> None:
    values = {draw_rng(s, n, stream=t).random() for s in (0, 1) for n in (0, 1) for t in (0, 1)}
    assert len(values) == 8
    assert draw_rng(3, 5).random() == draw_rng(3, 5).random()
    with pytest.raises(ConfigError, match="negative"):
        draw_rng(-1, 0)


def test_slow_sample_blocks_nobody_within_the_window(tmp_path: Path) -> None:
    """Others overtake a slow sample up to the window and no further; in order mode, none does."""
    overtaken, in_order = tmp_path / "overtaken", tmp_path / "in_order"
    overtaken.mkdir()
    in_order.mkdir()
    entries = ["x"] * 12
    make = Slow(overtaken, slow=1, others=6)
    with SampleLoader(make, entries, workers=2, prefetch=1, window=7, deterministic=False) as loader:
        order = [draw.number for draw in loader]
    assert sorted(order) == list(range(12))
    # Draw 1 begins second and is only ready once draws 0 and 2-6 have begun; 8 is beyond the window.
    assert order.index(1) >= 4
    assert max(order[: order.index(1)]) <= 7
    with SampleLoader(Slow(in_order, slow=1, others=6), entries, workers=2, prefetch=6) as loader:
        assert [draw.number for draw in loader] == list(range(12))


def test_replay_gives_the_recorded_order_and_then_the_rest(tmp_path: Path) -> None:
    """The log of a run, read back from its lines, repeats the run exactly, however fast samples are now."""
    make = Slow(tmp_path, slow=0, others=4)
    with SampleLoader(make, cycle("x"), workers=2, prefetch=2, deterministic=False) as loader:
        order = numbers(loader, 8)
        log = "\n".join(json.dumps(event._asdict()) for event in loader.take_consumed())
        assert loader.consumed == []
    assert order[0] != 0
    recorded = [json.loads(line)["number"] for line in log.splitlines()]
    assert recorded == order
    with SampleLoader(numbered, cycle("x"), workers=0, deterministic=False, replay=recorded) as loader:
        assert numbers(loader, 12) == [*order, *(n for n in range(20) if n not in order)][:12]
    with SampleLoader(numbered, cycle("x"), workers=3, deterministic=False, replay=recorded[::-1]) as loader:
        assert numbers(loader, 8) == order[::-1]


def test_resumed_order_equals_the_uninterrupted_one() -> None:
    """Whatever was prepared but not handed out comes again; the state does not depend on how far that was."""
    entries = cycle("a", "bad", "b", "c")
    with SampleLoader(fails_for, entries) as loader:
        expected = numbers(loader, 20)
    with SampleLoader(fails_for, entries, workers=2, prefetch=5) as loader:
        first = numbers(loader, 7)
        state = json.loads(json.dumps(loader.state_dict()))
        numbers(loader, 3)
        loader.load_state_dict(state)
        assert numbers(loader, 3) == expected[7:10]
    plain = SampleLoader(fails_for, entries)
    plain.load_state_dict(state)
    assert first + numbers(plain, 13) == expected
    again = SampleLoader(fails_for, entries)
    numbers(again, 7)
    assert again.state_dict() == state


def test_unordered_run_resumes_without_loss_or_repetition(tmp_path: Path) -> None:
    make = Slow(tmp_path, slow=0, others=5)
    with SampleLoader(make, cycle("x"), workers=2, prefetch=2, deterministic=False) as loader:
        before = numbers(loader, 4)
        state = loader.state_dict()
        after = numbers(loader, 5)
        log = [event.number for event in loader.consumed]
    assert state["open"][0] == 0
    resumed = SampleLoader(numbered, cycle("x"), deterministic=False)
    resumed.load_state_dict(state)
    assert sorted(before + numbers(resumed, 8)) == list(range(12))
    # With the whole log, which reaches back before the checkpoint, the order is that of the first run too.
    replayed = SampleLoader(numbered, cycle("x"), deterministic=False, replay=log)
    replayed.load_state_dict(state)
    assert numbers(replayed, 5) == after


def test_ranks_share_the_order_and_their_states_merge_into_any_number() -> None:
    loaders = [SampleLoader(numbered, cycle("x"), rank=r, ranks=3) for r in range(3)]
    assert [numbers(loader, 2) for loader in loaders] == [[0, 3], [1, 4], [2, 5]]
    merged = merge_states([loader.state_dict() for loader in loaders[::-1]])
    single = SampleLoader(numbered, cycle("x"))
    numbers(single, 6)
    assert merged == single.state_dict()
    numbers(loaders[1], 1)  # a rank that passed over a draw is ahead
    merged = merge_states([loader.state_dict() for loader in loaders])
    pair = [SampleLoader(numbered, cycle("x"), rank=r, ranks=2) for r in range(2)]
    for loader in pair:
        loader.load_state_dict(merged)
    assert [numbers(loader, 3) for loader in pair] == [[6, 8, 10], [9, 11, 13]]
    with pytest.raises(ConfigError, match="rank 1 of 3 cannot continue as rank 0 of 2"):
        pair[0].load_state_dict(loaders[1].state_dict())
    with pytest.raises(ConfigError, match="all ranks"):
        merge_states([loaders[0].state_dict(), loaders[1].state_dict()])


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_sample_is_quarantined_with_its_reason(workers: int) -> None:
    """The loader goes on, names each bad entry once, and tries it no more."""
    with SampleLoader(fails_for, cycle("a", "bad1", "odd", "b"), workers=workers) as loader:
        assert numbers(loader, 6) == [0, 3, 4, 7, 8, 11]
        assert [name for name, _ in loader.quarantined] == ["bad1", "odd"]
        reasons = dict(loader.quarantined)
        assert reasons["bad1"] == "bad1.cif: is truncated; download it again"
        assert reasons["odd"].startswith("KeyError: 'odd' (loader_samples.py:")


@pytest.mark.parametrize("workers", [0, 2])
def test_entry_that_failed_once_is_passed_over_however_far_samples_are_prepared(workers: int) -> None:
    """A sample of it that was prepared meanwhile is dropped: else the order would depend on the timing."""
    with SampleLoader(fails_at_first, cycle("a", "moody"), workers=workers, prefetch=6) as loader:
        assert numbers(loader, 10) == list(range(0, 20, 2))
        assert [name for name, _ in loader.quarantined] == ["moody"]
        state = loader.state_dict()
    resumed = SampleLoader(fails_for, cycle("a", "moody"))
    resumed.load_state_dict(state)
    assert numbers(resumed, 2) == [19, 20]


def test_quarantined_entries_are_tried_again_after_a_resume() -> None:
    """A repaired one comes back; one that is still broken is quarantined anew, and one not drawn yet stays listed."""
    before = SampleLoader(fails_for, cycle("a", "bad1", "bad2", "bad3"))
    assert numbers(before, 2) == [0, 4]
    names = [name for name, _ in before.quarantined]
    assert names == ["bad1", "bad2", "bad3"]

    def repaired(number: int, entry: str) -> dict[str, np.ndarray]:
        return numbered(number, entry) if entry == "bad1" else fails_for(number, entry)

    after = SampleLoader(repaired, cycle("a", "bad1", "bad2", "bad3"))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [name for name, _ in after.quarantined] == names
    assert numbers(after, 1) == [5]
    assert [name for name, _ in after.quarantined] == ["bad2", "bad3"]
    assert numbers(after, 3) == [8, 9, 12]
    assert sorted(after.quarantined) == sorted(before.quarantined[1:])
    unchanged = SampleLoader(fails_for, cycle("a", "bad1", "bad2", "bad3"))
    unchanged.load_state_dict(before.state_dict())
    assert numbers(unchanged, 3) == numbers(before, 3) == [8, 12, 16]
    assert sorted(unchanged.quarantined) == sorted(before.quarantined)


def test_quarantined_entry_is_not_prepared_again() -> None:
    made: list[int] = []

    def make(number: int, entry: str) -> dict[str, np.ndarray]:
        made.append(number)
        return fails_for(number, entry)

    loader = SampleLoader(make, ["a", "bad", "bad", "b", "bad"])
    assert [draw.id for draw in loader] == ["a", "b"]
    assert made == [0, 1, 3]


def test_failures_are_only_counted_in_a_row() -> None:
    loader = SampleLoader(fails_for, cycle("a", "bad1", "bad2"), max_failures=3)
    assert len(numbers(loader, 10)) == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_but_failures_is_an_error_that_names_them(workers: int) -> None:
    message = r"5 draws in a row gave no sample; 2 entries .*\n  bad1: bad1.cif"
    loader = SampleLoader(fails_for, cycle("bad1", "bad2"), workers=workers, max_failures=5)
    with loader, pytest.raises(InputError, match=message):
        next(loader)


def test_killed_worker_is_replaced_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sample whose worker is killed is tried again; one that kills its worker every time is given up."""
    order = ["a", "once", "b", "always", "c", "d"]
    with SampleLoader(Deadly(tmp_path), order, workers=2) as loader:
        draws = list(loader)
        assert [draw.id for draw in draws] == ["a", "once", "b", "c", "d"]
        causes = [re.search(r"ended: killed by SIGKILL.*, at task (\d)", line) for line in caplog.messages]
        assert sorted(cause[1] for cause in causes if cause) == ["1", "3", "3"]
        ((name, reason),) = loader.quarantined
        assert name == "always"
        assert "ended 2 times: killed by SIGKILL" in reason


def test_worker_killed_from_outside_costs_no_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SampleLoader(Deadly(tmp_path), cycle("x"), workers=1, prefetch=1) as loader:
        pid = int(next(loader).sample["pid"])
        os.kill(pid, signal.SIGKILL)
        draws = [next(loader) for _ in range(6)]
        assert [draw.number for draw in draws] == list(range(1, 7))
        assert draws[-1].sample["pid"] != pid
        assert [f"(pid {pid}) ended: killed by SIGKILL" in line for line in caplog.messages] == [True]


def test_sample_that_never_ends_is_given_up(tmp_path: Path) -> None:
    with SampleLoader(Slow(tmp_path, 0, 99), ["stuck", "a"], workers=1, timeout_s=0.7) as loader:
        assert [draw.id for draw in loader] == ["a"]
        assert "no result after 0.7 s" in loader.quarantined[0][1]


def test_finite_order_ends_and_stays_ended() -> None:
    loader = SampleLoader(numbered, ["a", "b", "c"], rank=1, ranks=2, workers=1)
    assert [draw.id for draw in loader] == ["b"]
    assert list(loader) == []


def test_waiting_is_measured() -> None:
    """Only the time inside the loader counts, and all of it."""
    start = time.perf_counter()
    loader = SampleLoader(slowly, cycle("x"))
    next(loader)
    time.sleep(0.1)
    next(loader)
    assert 0.2 <= loader.waited_s <= time.perf_counter() - start - 0.1


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers"):
        SampleLoader(numbered, ["a"], workers=-1)
    with pytest.raises(ConfigError, match="rank 0 of 2"):
        SampleLoader(numbered, ["a"], ranks=2, replay=[0, 1])
    with pytest.raises(ConfigError, match="workers=0"):
        next(SampleLoader(lambda number, entry: {}, ["a"], workers=1))
    with pytest.raises(ConfigError, match="version"):
        SampleLoader(numbered, ["a"]).load_state_dict({"version": 0})


SCRIPT = """
    import os, sys, time
    import numpy as np
    from fastfold.data.loading.loader import SampleLoader

    def make(number, entry):
        if number >= 3:
            time.sleep(60)
        return {"pid": np.array(os.getpid())}

    if GUARD:
        with SampleLoader(make, lambda number: "x", workers=3, deterministic=False) as loader:
            pids = set()
            while len(pids) < 1:
                pids.add(int(next(loader).sample["pid"]))
            print(*[w.process.pid for w in loader._pool._workers], flush=True)
            next(loader), next(loader), next(loader)
"""


def start_script(folder: Path, guard: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("GUARD", guard))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=interruptible,
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(tmp_path: Path, sent: signal.Signals) -> None:
    """Busy workers end with the parent, whether it is interrupted, terminated or killed."""
    parent = start_script(tmp_path, "__name__ == '__main__'")
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    if sent == signal.SIGINT:
        os.killpg(parent.pid, sent)  # as the terminal does
    else:
        parent.send_signal(sent)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode != 0
    assert errors.count("Traceback") == (1 if sent == signal.SIGINT else 0)
    end = time.monotonic() + 5
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked here")
def test_interrupt_never_reaches_a_worker() -> None:
    """Not even while it starts, when it could not ignore it yet; the main process still gets it."""
    with SampleLoader(blocked_signals, ["x"], workers=1) as loader:
        assert next(loader).sample["interrupt"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_script_without_main_guard_is_told_so(tmp_path: Path) -> None:
    parent = start_script(tmp_path, "True")
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert "guard the code of your own script with: if __name__ == '__main__'" in errors
