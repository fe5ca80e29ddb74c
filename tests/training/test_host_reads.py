"""A training step looks at no value on the device, and computes what it computes where it does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fastfold.data.loading.loader import SampleLoader
from fastfold.evoformer.model import AlphaFold
from fastfold.training import trainer
from fastfold.training.logging.loggers import read_json_lines
from fastfold.training.logging.profiling import FlopCounter
from fastfold.training.optim import grad_accumulation
from fastfold.training.run import train
from fastfold.training.step_outcome import StepOutcome
from fastfold.training.trainer import Trainer
from tests.helpers.compositions import compose_run
from tests.helpers.host_reads import HostRead, NoHostReads, as_on_a_device
from tests.parallel.alphafold.axial_cases import difference
from tests.parallel.alphafold.axial_networks import (
    gradient_differences,
    monomer_sample,
    small_network,
    train_step,
    worst_of,
)
from tests.training.conftest import TINY
from tests.training.test_train import weights


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: float(x.sum()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.cpu(),
    ],
)
def test_reads_are_noticed(read: Any) -> None:
    x = torch.ones(3)
    with NoHostReads(), pytest.raises(HostRead):
        read(x)
    with NoHostReads(lambda: [x]):
        torch.nn.functional.one_hot(torch.tensor([1, 2]), 4) + x.to(torch.int64).cumsum(0)[0]
        assert x.tolist() == [1.0] * 3


def _without_dropout(network: AlphaFold) -> AlphaFold:
    """Templates that nobody sees draw numbers for their dropout, too, where nobody looks which they are."""
    for module in network.modules():
        for name in ("rate", "dropout_rate"):
            if hasattr(module, name):
                setattr(module, name, 0.0)
    return network


def test_network_and_losses_read_nothing_and_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With templates, one of them hidden, recycling and every loss: in float64 all gradients are equal."""
    sample, plain = monomer_sample(13, 4, 3), _without_dropout(small_network("synthetic_monomer"))
    assert 0 < sample.features["template_mask"].mean() < 1
    blind = copy.deepcopy(plain)
    expected = train_step(plain, sample)
    with NoHostReads(), pytest.raises(HostRead):
        train_step(copy.deepcopy(plain), sample)
    as_on_a_device(monkeypatch)
    with NoHostReads():
        found = train_step(blind, sample)
    assert max(difference(x, expected[name], least=1e-9) for name, x in found.items()) < 1e-12
    worst, name = worst_of(gradient_differences(blind, plain))
    assert worst < 1e-11, name


def _counters(run: Trainer) -> Iterator[Tensor]:
    """Counters of steps, which PyTorch's optimizers keep on the host."""
    for state in run._optimizer.state.values():
        yield state["step"]


def _run(data: Path, out: Path, *overrides: str) -> bool:
    run = [f"data.directory={data}", f"trainer.out={out}", "trainer.log_every=1", "optim.batch_size=2"]
    return train(compose_run(TINY, *run, *overrides))


def _run_and_look(data: Path, out: Path, *overrides: str) -> None:
    """The same sums, of a run that looks whether a step was finite before it takes it."""
    with pytest.MonkeyPatch.context() as patched:
        as_on_a_device(patched)
        for module in (trainer, grad_accumulation):
            patched.setattr(module, "reads_are_free", lambda device: True)
        assert _run(data, out, *overrides)


def _numbers(out: Path) -> list[dict[str, float]]:
    timed = ("seconds", "waited_s", "tflops_per_s", "tflops_per_s_device", "time")
    lines = [line for line in read_json_lines(out / "metrics.jsonl") if "loss" in line]
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


@pytest.mark.long
def test_a_training_step_reads_nothing_and_gives_the_same_weights(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, loss, backward, clipping, optimizer, average, under a mode that raises; numbers are read a step late."""
    monkeypatch.setattr(trainer, "FlopCounter", FlopCounter)  # which other runs leave out
    steps = ["trainer.steps=3", "trainer.checkpoint_every=100"]
    _run_and_look(data_folder, tmp_path / "looks", *steps)
    as_on_a_device(monkeypatch)
    step, update, read, drawn = Trainer._step, Trainer._update, StepOutcome.read, SampleLoader.__next__
    events: list[str] = []

    def without_reads(self: Trainer, started: float) -> None:
        mode = NoHostReads(lambda: _counters(self))

        def read_late(outcome: StepOutcome) -> Any:
            events.append("read")
            with mode.allowed():
                return read(outcome)

        def load(loader: SampleLoader) -> Any:
            with mode.allowed():  # samples are arrays of the host
                return drawn(loader)

        monkeypatch.setattr(StepOutcome, "read", read_late)
        monkeypatch.setattr(SampleLoader, "__next__", load)
        with mode:
            step(self, started)

    def noted(self: Trainer, *arguments: Any) -> Any:
        events.append("update")
        return update(self, *arguments)

    monkeypatch.setattr(Trainer, "_step", without_reads)
    monkeypatch.setattr(Trainer, "_update", noted)
    assert _run(data_folder, tmp_path / "late", *steps)
    assert events == ["update", *["read", "update"] * 2, "read"]
    assert _numbers(tmp_path / "late") == _numbers(tmp_path / "looks")
    looks, late = weights(tmp_path / "looks"), weights(tmp_path / "late")
    assert all(torch.equal(late[name], x) for name, x in looks.items())


@pytest.mark.slow
def test_a_step_that_is_skipped_a_step_late_leaves_everything_as_it_was(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizer states, counters and averages are bit by bit those of a run that looks at every step."""
    true_loss = trainer.alphafold_loss

    def spoilt(result: Any, batch: Any, tree: Any) -> Any:
        loss, parts = true_loss(result, batch, tree)
        return (loss * float("nan") if len(batch["aatype"]) == 24 else loss), parts

    monkeypatch.setattr(trainer, "alphafold_loss", spoilt)
    steps = ["trainer.steps=8", "trainer.checkpoint_every=8", "optim.batch_size=1"]
    looks, late = tmp_path / "looks", tmp_path / "late"
    _run_and_look(data_folder, looks, *steps)
    as_on_a_device(monkeypatch)
    assert _run(data_folder, late, *steps)
    assert 1 <= _numbers(late)[-1]["skipped"] < 8
    assert _numbers(late) == _numbers(looks)
    plain, found = (_checkpoint(folder) for folder in (looks, late))
    assert plain.keys() == found.keys()
    assert {name.partition(".")[0] for name in plain} == {"model", "ema", "adam"}
    assert all(torch.equal(found[name], x) for name, x in plain.items())


def _checkpoint(out: Path) -> dict[str, Tensor]:
    files = sorted((out / "checkpoints" / "step_00000008").rglob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}
