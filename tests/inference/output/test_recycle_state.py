"""A fold that was killed, or ran out of memory, goes on after its last finished pass, and ends in the same bytes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from fastfold.cli import main
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.output.prediction import Recycle
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.output.results_folder import STATE
from tests.helpers.command_line import CommandLine
from tests.helpers.forked import Forked, rank_environments
from tests.helpers.thread_ranks import Line, Seat

T = TypeVar("T")
SEQUENCE, CPU = "MKTAYIAKQRQISFVKSH", torch.device("cpu")


def _state(path: Path, said: list[str] | None = None, **options: Any) -> RecycleState:
    said = [] if said is None else said
    settings = {"key": "a", "after": 0.0, "say": said.append} | options
    return RecycleState(path / "x.state", **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_comes_back_bit_by_bit(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of rows, of which the last is shorter; with the structures of the passes before."""
    monkeypatch.setattr("fastfold.utils.tensor_files._BLOCK", 200)
    previous = {"prev_pair": torch.randn(7, 7, 4).to(dtype), "prev_pos": torch.randn(7, 37, 3)}
    state = _state(tmp_path)
    state.recycles = [Recycle(np.full((7, 37, 3), k, np.float32), np.full(7, k, np.float32)) for k in (1, 2)]
    state.save(2, 5, previous)
    said: list[str] = []
    other = _state(tmp_path, said)
    found = other.load(CPU)
    assert found is not None
    assert found[:2] == (2, 5)
    assert found[2].keys() == previous.keys()
    for name, tensor in previous.items():
        assert torch.equal(found[2][name], tensor)
        assert found[2][name].dtype == tensor.dtype
    assert [one.plddt[0] for one in other.recycles] == [1.0, 2.0]
    assert said == ["continuing after pass 2 of an interrupted fold"]
    other.remove()
    assert _state(tmp_path).load(CPU) is None
    assert os.listdir(tmp_path) == []


def test_a_fold_with_dropout_goes_on_with_the_numbers_it_would_have_drawn(tmp_path: Path) -> None:
    previous = {"prev_pos": torch.randn(4, 3)}
    with torch.random.fork_rng():
        _state(tmp_path, random=True).save(1, 3, previous)
        drawn = torch.rand(5)
        found = _state(tmp_path, random=True).load(CPU)
        assert torch.equal(torch.rand(5), drawn)
    assert found is not None
    assert found[2].keys() == previous.keys()


def test_another_fold_s_state_and_a_damaged_file_are_left_alone(tmp_path: Path) -> None:
    state = _state(tmp_path)
    assert state.load(CPU) is None
    state.save(1, 3, {"prev_pos": torch.ones(4, 3)})
    assert _state(tmp_path, key="b").load(CPU) is None
    content = (tmp_path / "x.state").read_bytes()
    for damaged in (b"", content[:20], content[:-5], b"\xff" * 100):
        (tmp_path / "x.state").write_bytes(damaged)
        assert _state(tmp_path).load(CPU) is None


@pytest.mark.parametrize("newer", ["x.state", "x.state.next"])
def test_the_later_of_two_states_counts(tmp_path: Path, newer: str) -> None:
    """A process that ended while it replaced the file leaves both."""
    files = {}
    for cycle in (1, 2):
        _state(tmp_path).save(cycle, 5, {"prev_pos": torch.full((4, 3), float(cycle))})
        files[cycle] = (tmp_path / "x.state").read_bytes()
    (tmp_path / newer).write_bytes(files[2])
    (tmp_path / ("x.state" if newer != "x.state" else "x.state.next")).write_bytes(files[1])
    found = _state(tmp_path).load(CPU)
    assert found is not None
    assert (found[0], float(found[2]["prev_pos"][0, 0])) == (2, 2.0)


def test_only_the_state_of_long_passes_is_written(tmp_path: Path) -> None:
    times = iter([0.0, 0.0, 50.0, 50.0, 200.0, 200.0, 300.0])
    state = _state(tmp_path, after=100.0, clock=lambda: next(times))
    assert state.load(CPU) is None
    state.save(1, 3, {"prev_pos": torch.ones(4, 3)})  # after 50 seconds
    assert os.listdir(tmp_path) == []
    state.save(2, 3, {"prev_pos": torch.ones(4, 3)})  # after 150 more
    assert os.listdir(tmp_path) == ["x.state"]


def test_a_state_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    said: list[str] = []
    state = _state(tmp_path / "missing", said)
    for cycle in (1, 2):
        state.save(cycle, 3, {"prev_pos": torch.ones(4, 3)})
    assert len(said) == 1
    assert "warning: the state of the fold is not saved" in said[0]


def _of_two(path: Path, said: list[str], act: Callable[[int, RecycleState], T]) -> list[T]:
    """What two processes, here threads, that have a state each come to."""
    line = Line(2)

    def run(rank: int) -> T:
        gather = Seat(line, rank).all
        state = _state(path).of_rank()(rank, gather) if rank else _state(path, said, gather=gather)
        return act(rank, state)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def _saved(rank: int, state: RecycleState, *cycles: int) -> None:
    for cycle in cycles:
        state.save(cycle, 5, {"prev_pair": torch.full((3 + rank, 2), cycle + 0.5 * rank)})


def _loaded(rank: int, state: RecycleState) -> float | None:
    found = state.load(CPU)
    return None if found is None else float(found[2]["prev_pair"].mean())


def test_processes_go_on_after_the_last_pass_that_all_of_them_have(tmp_path: Path) -> None:
    """Whichever of them was killed when: before all had written the pass, or before all had renamed their files."""
    said: list[str] = []
    assert _of_two(tmp_path, said, _loaded) == [None, None]
    _of_two(tmp_path, said, lambda rank, state: _saved(rank, state, 1, 2))
    own, other = tmp_path / "x.state", tmp_path / "x.rank_1.state"
    assert sorted(os.listdir(tmp_path)) == ["x.rank_1.state", "x.state"]
    assert _of_two(tmp_path, said, _loaded) == [2.0, 2.5]
    second = own.read_bytes(), other.read_bytes()
    _of_two(tmp_path, said, lambda rank, state: _saved(rank, state, 3))
    (tmp_path / "x.rank_1.state.next").write_bytes(other.read_bytes())
    other.write_bytes(second[1])
    assert _of_two(tmp_path, said, _loaded) == [3.0, 3.5]
    (tmp_path / "x.state.next").write_bytes(own.read_bytes())
    own.write_bytes(second[0])
    (tmp_path / "x.rank_1.state.next").unlink()
    assert _of_two(tmp_path, said, _loaded) == [2.0, 2.5]
    other.write_bytes(second[1][:-5])
    assert _of_two(tmp_path, said, _loaded) == [None, None]
    _state(tmp_path).remove()
    assert os.listdir(tmp_path) == []


def test_what_one_process_cannot_write_is_kept_of_none(tmp_path: Path) -> None:
    """The pass before stays; it is said once, by the first process."""
    said: list[str] = []

    def save(rank: int, state: RecycleState) -> None:
        _saved(rank, state, 1)
        if rank:
            state._next = tmp_path / "missing" / "x"
        _saved(rank, state, 2, 3)

    _of_two(tmp_path, said, save)
    assert sorted(os.listdir(tmp_path)) == ["x.rank_1.state", "x.state"]
    assert _of_two(tmp_path, [], _loaded) == [1.0, 1.5]
    assert len(said) == 1
    assert "missing" in said[0]


def _killed(arguments: list[str], after: int) -> int:
    """``fastfold`` that is killed in a pass, before it is done."""
    iterate = AlphaFold.iterate
    calls = []

    def watched(*given: Any) -> Any:
        calls.append(None)
        if len(calls) > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return iterate(*given)

    AlphaFold.iterate = watched  # type: ignore[method-assign]
    return main(arguments)


def _arguments(cli: CommandLine, out: Path, *more: object) -> list[str]:
    fasta, weights = cli.fasta({"T1": SEQUENCE}), cli.weights()
    fixed = ["--no-plots", "--device", "cpu", "--num-recycles", "4", "--checkpoint-after", "0"]
    return [str(x) for x in ("infer", fasta, "--weights", weights, "--out", out, *fixed, *more)]


@pytest.mark.parametrize("more", [("--dropout",), pytest.param((), marks=pytest.mark.slow)])
def test_a_killed_fold_goes_on_and_ends_in_the_same_bytes(
    more: tuple[str, ...], cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice, each time in a later pass; only the passes that are missing are made."""
    more = ("--save-recycles", *more)
    assert main(_arguments(cli, cli.out, *more)) == 0
    out = cli.folder / "killed"
    for after in (3, 1):
        process = Forked(_killed, _arguments(cli, out, *more), after, env={})
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert len(list((out / STATE).rglob("*.state"))) == 1
    iterate, calls = AlphaFold.iterate, []

    def counted(*given: Any) -> Any:
        calls.append(None)
        return iterate(*given)

    monkeypatch.setattr(AlphaFold, "iterate", counted)
    assert main(_arguments(cli, out, *more)) == 0
    assert len(calls) == 1  # of five
    assert not list((out / STATE).rglob("*.state"))
    compared = [name for name in sorted(path.name for path in cli.out.iterdir()) if "config" not in name]
    structures = [name for name in compared if name.endswith((".pdb", ".cif", "_pae.json"))]
    assert len(structures) >= 3
    for name in structures:
        assert (out / name).read_bytes() == (cli.out / name).read_bytes(), name


def test_a_fold_that_ran_out_of_memory_goes_on_in_smaller_pieces_where_it_was(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    iterate, calls = AlphaFold.iterate, []

    def ends_once(*given: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return iterate(*given)

    monkeypatch.setattr(AlphaFold, "iterate", ends_once)
    assert main(_arguments(cli, cli.out)) == 0
    assert len(calls) == 6  # five, and the one that failed
    said = capsys.readouterr().err
    assert "out of memory with a plan of" in said
    assert "continuing after pass 3 of an interrupted fold" in said


def _passes_made(arguments: list[str]) -> int:
    """``fastfold`` that says how many passes it makes."""
    iterate = AlphaFold.iterate
    calls = []

    def counted(*given: Any) -> Any:
        calls.append(None)
        return iterate(*given)

    AlphaFold.iterate = counted  # type: ignore[method-assign]
    code = main(arguments)
    print(f"{len(calls)} passes", file=sys.stderr)
    return code


@pytest.mark.slow
def test_two_processes_that_were_killed_go_on_and_end_in_the_same_bytes(cli: CommandLine) -> None:
    def two(out: Path, what: Callable[..., int], *more: Any) -> list[tuple[int, str]]:
        arguments = _arguments(cli, out, "--parallel", "dap=2")
        started = [Forked(what, arguments, *more, env=environment) for environment in rank_environments(2)]
        errors = [process.communicate(120)[1] for process in started]
        return [(process.returncode, text) for process, text in zip(started, errors, strict=True)]

    killed = cli.folder / "killed"
    assert [code for code, _ in two(killed, _killed, 3)] == [-signal.SIGKILL] * 2
    assert len(list((killed / STATE).rglob("*.state"))) == 2
    found = two(killed, _passes_made)
    assert [code for code, _ in found] == [0, 0], found
    assert "continuing after pass 3 of an interrupted fold" in found[0][1]
    assert all("2 passes" in text for _, text in found)  # of five
    assert not list((killed / STATE).rglob("*.state*"))
    assert [code for code, _ in two(cli.out, _passes_made)] == [0, 0]
    structures = [
        path.name for path in cli.out.iterdir() if path.name.endswith((".pdb", ".cif", "_pae.json"))
    ]
    assert len(structures) >= 3
    for name in structures:
        assert (killed / name).read_bytes() == (cli.out / name).read_bytes(), name
