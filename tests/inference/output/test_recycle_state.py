"""A fold that was killed, or ran out of memory, goes on after its last finished pass, and ends in the same bytes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.cli import main
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.output.prediction import Recycle
from fastfold.inference.output.recycle_state import RecycleState
from fastfold.inference.output.results_folder import STATE
from tests.helpers.command_line import CommandLine
from tests.helpers.forked import Forked

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
    monkeypatch.setattr("fastfold.inference.output.recycle_state._BLOCK", 200)
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
    assert said == ["going on after pass 2 of a fold that was interrupted"]
    other.remove()
    assert _state(tmp_path).load(CPU) is None
    assert os.listdir(tmp_path) == []


def test_another_fold_s_state_and_a_damaged_file_are_left_alone(tmp_path: Path) -> None:
    state = _state(tmp_path)
    assert state.load(CPU) is None
    state.save(1, 3, {"prev_pos": torch.ones(4, 3)})
    assert _state(tmp_path, key="b").load(CPU) is None
    content = (tmp_path / "x.state").read_bytes()
    for damaged in (b"", content[:20], content[:-5], b"\xff" * 100):
        (tmp_path / "x.state").write_bytes(damaged)
        assert _state(tmp_path).load(CPU) is None


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
    assert "warning: the state of the fold is not kept" in said[0]


def _killed(arguments: list[str], after: int) -> int:
    """``fastfold`` that is killed in a pass, before it is done."""
    iterate = AlphaFold._iterate
    calls = []

    def watched(*given: Any) -> Any:
        calls.append(None)
        if len(calls) > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return iterate(*given)

    AlphaFold._iterate = watched  # type: ignore[method-assign]
    return main(arguments)


def _arguments(cli: CommandLine, out: Path, *more: object) -> list[str]:
    fasta, weights = cli.fasta({"T1": SEQUENCE}), cli.weights()
    fixed = ["--no-plots", "--device", "cpu", "--num-recycles", "4", "--checkpoint-after", "0"]
    return [str(x) for x in ("infer", fasta, "--weights", weights, "--out", out, *fixed, *more)]


def test_a_killed_fold_goes_on_and_ends_in_the_same_bytes(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice, each time in a later pass; only the passes that are missing are made."""
    more = ("--save-recycles",)
    assert main(_arguments(cli, cli.out, *more)) == 0
    out = cli.folder / "killed"
    for after in (3, 1):
        process = Forked(_killed, _arguments(cli, out, *more), after, env={})
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert len(list((out / STATE).rglob("*.state"))) == 1
    iterate, calls = AlphaFold._iterate, []

    def counted(*given: Any) -> Any:
        calls.append(None)
        return iterate(*given)

    monkeypatch.setattr(AlphaFold, "_iterate", counted)
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
    iterate, calls = AlphaFold._iterate, []

    def ends_once(*given: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return iterate(*given)

    monkeypatch.setattr(AlphaFold, "_iterate", ends_once)
    assert main(_arguments(cli, cli.out)) == 0
    assert len(calls) == 6  # five, and the one that failed
    said = capsys.readouterr().err
    assert "out of memory with a plan of" in said
    assert "going on after pass 3 of a fold that was interrupted" in said
