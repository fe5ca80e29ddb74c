"""Work of finished folds in another process: same files, errors of the right target, overlap."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fastfold.errors import FastFoldError, InputError
from fastfold.evoformer import model
from fastfold.inference import target_runner
from fastfold.inference.config import InferConfig
from fastfold.inference.embedding.config import EmbedConfig
from fastfold.inference.folding import background, network
from fastfold.inference.folding.background import (
    MAX_PROCESSES,
    PLOTS,
    PROCESS_BYTES,
    RELAXATION,
    Background,
    BackgroundWork,
    count_processes,
)
from fastfold.inference.folding.batch import Request
from fastfold.inference.folding.schedule import Schedule, Start
from fastfold.inference.output import plots
from tests.helpers.command_line import CommandLine
from tests.inference.folding.functions import die_once, end_other_process, fail, meet


def test_calls_run_in_another_process_and_raise_their_errors() -> None:
    background = Background()
    try:
        assert background.submit(BackgroundWork(os.getpid, (), {})).result() != os.getpid()
        with pytest.raises(InputError, match="record 'a': too long"):
            background.submit(BackgroundWork(fail, ("input",), {})).result()
        with pytest.raises(RuntimeError, match="bug"):
            background.submit(BackgroundWork(fail, (), {"kind": "bug"})).result()
        with pytest.raises(FastFoldError, match="ended: exit code 3"):
            background.submit(BackgroundWork(fail, ("exit",), {})).result()
        assert background.submit(BackgroundWork(os.getpid, (), {})).result() != os.getpid()
    finally:
        background.close()


def test_a_call_whose_process_is_killed_is_repeated_in_another_one(tmp_path: Path) -> None:
    background = Background()
    try:
        assert background.submit(BackgroundWork(die_once, (tmp_path / "mark",), {})).result() == "done"
    finally:
        background.close()


def test_a_call_that_ended_its_process_is_not_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other process starts, calls are made here, but for one that might end this process too."""
    background = Background()
    try:
        background.submit(BackgroundWork(os.getpid, (), {})).result()
        monkeypatch.setattr(background, "_start", lambda: 1 / 0)
        call = BackgroundWork(end_other_process, (os.getpid(),), {})
        with pytest.raises(FastFoldError, match="ended: exit code 3"):
            background.submit(call).result()
        assert background.submit(call).result() == "called here"
    finally:
        background.close()


def test_calls_share_processes_of_lower_priority(tmp_path: Path) -> None:
    background = Background(processes=2)
    try:
        both = [background.submit(BackgroundWork(meet, (tmp_path, name), {})) for name in ("ab", "ba")]
        assert {one.result() for one in both} == {min(19, os.nice(0) + 10)}
    finally:
        background.close()


def test_processes_are_as_many_as_targets_cores_and_memory_allow() -> None:
    assert count_processes(20, 2, 1 << 40) == 2
    assert count_processes(1, 16, 1 << 40) == 1
    assert count_processes(20, 16, 1 << 40) == MAX_PROCESSES
    assert count_processes(20, 16, 16 * PROCESS_BYTES) == 2
    assert count_processes(20, 16, 0) == 1


@pytest.mark.parametrize(
    ("settings", "started"),
    [
        ({}, (1, PLOTS)),
        ({"plots": False}, None),
        ({"embed": EmbedConfig()}, None),
        ({"plots": False, "relax": "best"}, (3, RELAXATION)),
    ],
)
def test_processes_start_only_for_plots_and_relaxation(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], started: Any
) -> None:
    found: list[Any] = []

    class Started:
        def __init__(self, modules: Any, processes: int) -> None:
            found.append((processes, modules))

        def submit(self, call: BackgroundWork) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result({})
            return future

        def close(self) -> None:
            pass

    monkeypatch.setattr(background, "Background", Started)
    monkeypatch.setattr(background, "available_cores", lambda: 8)
    with background.open_background(InferConfig(**settings), torch.device("cpu"), 3):
        pass
    assert found == ([] if started is None else [started])


class Inline:
    """A background in a thread of this process."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def submit(self, call: BackgroundWork) -> Future[Any]:
        future: Future[Any] = Future()

        def answer() -> None:
            try:
                future.set_result(self.run(call))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=answer).start()
        return future


def test_targets_end_while_others_wait_and_errors_belong_to_them() -> None:
    def run(call: BackgroundWork) -> Any:
        time.sleep(call.arguments[0])
        if call.arguments[0] > 0.1:
            raise InputError("late")
        return "drawn"

    def steps(seconds: float) -> Any:
        found = yield BackgroundWork(time.sleep, (seconds,), {})
        return found

    schedule: Schedule[str, str] = Schedule(None, Inline(run))  # type: ignore[arg-type]
    works = ["slow", "fast"]
    assert list(schedule.fold([(works[0], steps(0.3)), (works[1], steps(0.05))])) == []
    first, second = schedule.wait(1)
    assert first == ("fast", "drawn")
    assert second[0] == "slow"
    assert isinstance(second[1], InputError)


@pytest.mark.parametrize("is_inline", [False, True])
def test_started_work_goes_on_while_its_target_does_other_things(is_inline: bool) -> None:
    ready = threading.Event()

    def meet(seconds: float) -> str:
        return "met" if is_inline or ready.wait(seconds) else "waited in vain"

    def steps() -> Any:
        started = yield Start(BackgroundWork(meet, (9.0,), {}))
        failing = yield Start(BackgroundWork(float, ("late",), {}))
        ready.set()
        found = yield started
        with pytest.raises(ValueError, match="late"):
            yield failing
        return found

    schedule: Schedule[str, str] = Schedule(None, None if is_inline else Inline(BackgroundWork.run))  # type: ignore[arg-type]
    assert [*schedule.fold([("a", steps())]), *schedule.wait(1)] == [("a", "met")]


def test_targets_of_several_groups_never_share_passes() -> None:
    class Batches:
        sizes: ClassVar[list[int]] = []

        def predict(self, requests: Any) -> list[str]:
            self.sizes.append(len(requests))
            return ["folded"] * len(requests)

    class Held:
        def __init__(self) -> None:
            self.futures: list[Future[Any]] = []

        def submit(self, call: BackgroundWork) -> Future[Any]:
            self.futures.append(Future())
            return self.futures[-1]

    def steps() -> Any:
        yield BackgroundWork(time.sleep, (0,), {})
        found = yield Request(None, None, 0)  # type: ignore[arg-type]
        return found

    held = Held()
    schedule: Schedule[str, str] = Schedule(Batches(), held)  # type: ignore[arg-type]
    assert [*schedule.fold([("a", steps()), ("b", steps())]), *schedule.fold([("c", steps())])] == []
    for future in held.futures:
        future.set_result("drawn")
    assert dict([*schedule.wait(9), *schedule.fold([])]) == dict.fromkeys("abc", "folded")
    assert Batches.sizes == [2, 1]


def test_a_target_that_waited_ends_before_those_folded_meanwhile() -> None:
    drawn: Future[str] = Future()

    class Batches:
        def predict(self, requests: Any) -> list[str]:
            drawn.set_result("drawn")
            return ["folded"] * len(requests)

    def steps(awaited: Any) -> Any:
        found = yield awaited
        return found

    schedule: Schedule[str, str] = Schedule(Batches(), None)  # type: ignore[arg-type]
    group = [("a", steps(drawn)), ("b", steps(Request(None, None, 0)))]  # type: ignore[arg-type]
    assert [*schedule.fold(group)] == [("a", "drawn"), ("b", "folded")]


def test_a_descent_waits_for_no_plot_and_moves_nothing_in_it(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    plotted: list[dict[str, Any]] = []
    compute = network.predicted_aligned_error
    submit, descend, write = Background.submit, model.descend, target_runner.write_result

    def submitted(self: Background, call: BackgroundWork) -> Future[Any]:
        if call.function is target_runner.confidence_png:
            events.append("plot")
            plotted.append(call.options)
        return submit(self, call)

    def descended(*arguments: Any, **options: Any) -> torch.Tensor:
        events.append("descent")
        return descend(*arguments, **options)

    def written(results: Any, record: Any, prediction: Any, *arguments: Any, **options: Any) -> Any:
        plotted.append(prediction.plot_arguments())
        return write(results, record, prediction, *arguments, **options)

    def computed(*arguments: Any) -> Any:
        events.append("confidences")
        return compute(*arguments)

    monkeypatch.setattr(Background, "_start", lambda self: None)
    monkeypatch.setattr(Background, "submit", submitted)
    monkeypatch.setattr(network, "predicted_aligned_error", computed)
    monkeypatch.setattr(model, "descend", descended)
    monkeypatch.setattr(target_runner, "write_result", written)
    fasta = cli.fasta({"a": "MKTAYIAKQRQISFVK"})
    assert cli.infer(fasta, weights=[], settings=("--num-recycles", "1")).code == 0
    assert events == ["confidences", "plot", "descent"]
    draft, final = plotted
    assert draft.keys() == final.keys()
    for key, value in final.items():
        np.testing.assert_array_equal(draft[key], value, err_msg=key)
    assert any(name.endswith(".png") for name in cli.names())


@pytest.mark.long
def test_pictures_are_those_of_one_process(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    fasta = cli.fasta({"a": "MKTAYIAKQR", "b": "GSHMAWLPE"})
    settings = ("--num-recycles", "0")
    assert cli.infer(fasta, settings=settings).code == 0
    found = cli.contents()
    assert sum(name.endswith(".png") for name in found) == 2
    record = cli.scores("a")
    monkeypatch.setattr(Background, "_start", lambda self: None)
    drawn: list[str] = []
    monkeypatch.setattr(
        "fastfold.inference.target_runner.confidence_png",
        lambda **options: drawn.append(options["title"]) or plots.confidence_png(**options),
    )
    assert cli.infer(fasta, "--overwrite", settings=settings).code == 0
    assert len(drawn) == 2
    assert {k: v for k, v in cli.contents().items() if k.endswith(".png")} == {
        k: v for k, v in found.items() if k.endswith(".png")
    }
    assert cli.scores("a") == record
