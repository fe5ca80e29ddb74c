"""Muon for the matrices of the blocks: which parameters it steps, its state in checkpoints, and what refuses it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from fastfold.cli import main
from fastfold.errors import ConfigError
from fastfold.parallel import parallelize
from fastfold.training.compose import compose_config
from fastfold.training.config import OptimConfig
from fastfold.training.optim import optimizers
from fastfold.training.optim.optimizers import MuonWithAdam, make_optimizer
from tests.training.conftest import TINY

MUON = OptimConfig(name="muon", lr=1e-3, muon_lr=5e-3, momentum=0.95)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedder = nn.Linear(12, 8)
        self.evoformer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.evoformer(self.embedder(x))


def _orthogonality(matrix: torch.Tensor) -> float:
    """Ratio of the largest singular value to the smallest."""
    values = torch.linalg.svdvals(matrix)
    return float(values.max() / values.min())


def test_matrices_of_blocks_step_by_muon_and_the_rest_by_adam() -> None:
    model = _Network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(MUON, dict(model.named_parameters()))
    assert isinstance(optimizer, MuonWithAdam)
    model(torch.randn(64, 12)).square().sum().backward()
    gradient = model.evoformer[0].weight.grad.clone()
    optimizer.step()
    updates = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    # Adam's first step is the rate along the sign of the gradient; Muon's is nearly orthogonal.
    for name in ("embedder.weight", "embedder.bias", "evoformer.0.bias"):
        moved = updates[name][updates[name].abs() > 1e-5].abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=0.02, atol=0)
    # Five iterations leave the singular values between about a third and one.
    assert _orthogonality(updates["evoformer.0.weight"]) < min(4, _orthogonality(gradient) / 3)
    # Scaled to the root mean square of Adam's update, 0.2 of the rate for each element.
    assert updates["evoformer.0.weight"].square().mean().sqrt() == pytest.approx(0.2 * 5e-3, rel=0.3)


@pytest.mark.parametrize("most", [1, 1 << 24], ids=["one matrix at a time", "all of a shape together"])
def test_steps_are_those_of_pytorch(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's with its products, which are of bfloat16 on all devices, in float32."""
    monkeypatch.setattr(optimizers, "_MOST_ELEMENTS", most)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    shapes = [(8, 16), (16, 8), (16, 8), (12, 12), (1, 6)]
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in shapes]
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    moved = []
    for kind in (optimizers.Muon, torch.optim.Muon):
        parameters = [nn.Parameter(x.clone()) for x in start]
        unused = nn.Parameter(torch.ones(8, 16))
        optimizer = kind(
            [*parameters, unused], lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        )
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(parameters[0].grad, gradients[-1][0])
        assert torch.equal(unused, torch.ones(8, 16))
        moved.append([p.detach() - x for p, x in zip(parameters, start, strict=True)])
    for ours, theirs in zip(*moved, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_restored_state_steps_on_as_if_never_saved() -> None:
    def steps(model: nn.Module, optimizer, count: int, seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(64, 12)).square().sum().backward()
            optimizer.step()

    def fresh():
        parallel = parallelize(_Network(), {})
        optimizer = parallel.optimizer(lambda named: make_optimizer(MUON, named))
        optimizer.initialize()
        return parallel.module, optimizer

    model, optimizer = fresh()
    steps(model, optimizer, 2, 1)
    saved, state = model.state_dict(), optimizer.state_dict()
    saved = {name: x.clone() for name, x in saved.items()}
    state = copy.deepcopy(state)
    assert set(state["state"]["evoformer.0.weight"]) == {"momentum_buffer"}
    assert set(state["state"]["embedder.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    steps(model, optimizer, 2, 2)
    other, resumed = fresh()
    other.load_state_dict(saved)
    resumed.load_state_dict(state)
    steps(other, resumed, 2, 2)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], x, rtol=0, atol=0)


def test_a_state_of_adam_is_refused() -> None:
    parallel = parallelize(_Network(), {})
    adam = parallel.optimizer(lambda named: torch.optim.AdamW(named.values()))
    adam.initialize()
    optimizer = parallel.optimizer(lambda named: make_optimizer(MUON, named))
    with pytest.raises(ConfigError, match="lacks momentum_buffer of evoformer"):
        optimizer.load_state_dict(adam.state_dict())


def test_pieces_of_matrices_are_refused() -> None:
    pieces = {"evoformer.weight": nn.Parameter(torch.zeros(64)), "embedder": nn.Parameter(torch.zeros(8))}
    with pytest.raises(ConfigError, match=r"set parallel\.zero=0"):
        make_optimizer(MUON, pieces)


@pytest.mark.long
def test_a_run_continues_with_both_rates_on_one_schedule(data_folder: Path, tmp_path: Path) -> None:
    """Warm-up reaches both rates, and the checkpoint restores both kinds of state."""
    out = tmp_path / "run"
    light = ["optim.batch_size=1", "data.max_recycles=0"]
    command = [*TINY, *light, "optim=muon", f"data.directory={data_folder}", f"trainer.out={out}"]
    assert main(["train", *command, "trainer.steps=2", "trainer.checkpoint_every=1"]) == 0
    assert main(["train", *command, "trainer.steps=3", "trainer.checkpoint_every=1"]) == 0
    assert (out / "checkpoints" / "step_00000003").is_dir()


def test_memory_managers_refuse_muon(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        *TINY,
        "optim=muon",
        "memory=gemini",
        f"data.directory={data_folder}",
        f"trainer.out={tmp_path}",
    ]
    assert main(["train", *command]) != 0
    assert "optim.name=adam" in capsys.readouterr().err


def test_the_preset_of_mini_uses_it() -> None:
    config = compose_config(["+preset=mini", "data.directory=structures", "trainer.out=run"])
    assert (config.optim.name, config.data.oversample) == ("muon", {})


def test_a_step_that_a_scalar_calls_off_changes_nothing() -> None:
    model, other = _Network(), _Network()
    parallel, plain = parallelize(model, {}), parallelize(other, {})
    guarded, expected = (
        each.optimizer(lambda named: make_optimizer(MUON, named)) for each in (parallel, plain)
    )
    guarded.initialize()
    expected.initialize()
    for number, ok in enumerate((True, False, True)):
        torch.manual_seed(number)
        x = torch.randn(16, 12)
        for network in (model, other) if ok else (model,):
            (network(x).square().sum() * (1.0 if ok else torch.nan)).backward()
        parallel.reduce_gradients()
        undo = guarded.step(ok=torch.tensor(ok))
        if ok:
            plain.reduce_gradients()
            expected.step()
        else:
            undo()
        guarded.zero_grad()
        expected.zero_grad()
        for one, same in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, same)
            state, wanted = guarded.inner.state[one], expected.inner.state[same]
            assert all(torch.equal(state[key], wanted[key]) for key in wanted)
