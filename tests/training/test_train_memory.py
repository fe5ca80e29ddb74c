"""Training with parameters, states and activations placed by a plan: the run of a network that has the device alone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastfold.errors import ConfigError, OutputError
from fastfold.memory import BudgetError, Gemini, NvmeTier
from fastfold.training.compose import compose_config
from tests.training.test_train import command, environment, here, losses, wait_for, weights

COMMON = [
    "memory.checkpointing=true",
    "data.workers=0",
    "data.valid_split=valid",
    "trainer.validate_every=2",
    "trainer.steps=2",
    "optim.batch_size=2",
]
POLICIES = {
    # Hardly more than the largest operator needs.
    "auto": ["memory=gemini", "memory.budget=2MB"],
    "cpu": ["memory=gemini", "memory.policy=cpu", "memory.budget=2MB"],
    "nvme": ["memory=gemini", "memory.policy=nvme", "memory.budget=2MB"],
    "cuda": ["memory=gemini", "memory.policy=cuda", "memory.budget=256MB"],
}


@pytest.fixture(scope="module")
def unmanaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data and a run without a memory policy, recycling and checkpointing on."""
    from tests.training.conftest import write_helix

    folder = tmp_path_factory.mktemp("memory")
    for part, number, residues in (("train", 0, 12), ("train", 1, 16), ("valid", 2, 14)):
        write_helix(folder / "data" / part / f"helix{number}.pdb.gz", residues, number)
    here(folder / "data", folder / "plain", *COMMON)
    return folder / "data", folder / "plain"


@pytest.mark.long
@pytest.mark.parametrize(
    "policy", ["auto", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("cpu", "nvme", "cuda"))]
)
def test_every_policy_trains_the_same_network(
    policy: str, unmanaged: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Losses, validation and weights are bit-equal, with recycling and recomputed blocks, within the budget."""
    managers: list[Gemini] = []
    original = Gemini.__init__

    def noted(self: Gemini, *args: object, **options: object) -> None:
        original(self, *args, **options)  # type: ignore[arg-type]
        managers.append(self)

    monkeypatch.setattr(Gemini, "__init__", noted)
    data, plain = unmanaged
    folder = [f"memory.folder={tmp_path}"] if policy == "nvme" else []
    assert here(data, tmp_path / "managed", *COMMON, *POLICIES[policy], *folder)
    assert losses(tmp_path / "managed") == losses(plain)
    ours, theirs = weights(tmp_path / "managed"), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    validation = "validation.jsonl"
    assert (tmp_path / "managed" / validation).read_text() == (plain / validation).read_text()
    (manager,) = managers
    assert 0 < manager.device.peak <= manager.budget
    if policy != "cuda":
        assert manager.store.loads > 0
        assert manager.saved is not None
        assert manager.saved.recomputed > 0


@pytest.mark.slow
def test_a_run_continues_under_another_policy(unmanaged: tuple[Path, Path], tmp_path: Path):
    """Checkpoints are plain: a step under one policy, the next under another."""
    data, plain = unmanaged
    out = tmp_path / "run"
    short = [x for x in COMMON if not x.startswith("trainer.steps")]
    assert here(data, out, *short, "trainer.steps=1", *POLICIES["nvme"], f"memory.folder={tmp_path}")
    assert here(data, out, *short, "trainer.steps=2", *POLICIES["auto"])
    assert losses(out) == losses(plain)
    ours, theirs = weights(out), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "nvme"])
def test_killed_runs_continue(policy: str, unmanaged: tuple[Path, Path], tmp_path: Path):
    """Killed without warning after its first checkpoint, the same command goes on; no file of the tier is left."""
    data, plain = unmanaged
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    options = [*COMMON, *POLICIES[policy], f"memory.folder={scratch}", "trainer.checkpoint_every=1"]
    process = subprocess.Popen(command(data, out, *options), env=environment(), text=True)
    wait_for(out / "checkpoints" / "step_00000001", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(scratch.iterdir()) == []
    assert here(data, out, *options)
    assert losses(out) == losses(plain)
    ours, theirs = weights(out), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture
def disk_full_after_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """From the first checkpoint on the disk has no room for anything new."""
    reserve = os.posix_fallocate

    def full(*args: int) -> None:
        if (tmp_path / "run" / "checkpoints" / "step_00000001").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*args)

    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", full)
        yield patched


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_another_policy_continues_from_its_checkpoint(
    unmanaged: tuple[Path, Path], tmp_path: Path, disk_full_after_a_step: pytest.MonkeyPatch
):
    """A clear error in the second step; the checkpoint of the first is whole, and the run goes on from it elsewhere."""
    data, plain = unmanaged
    out = tmp_path / "run"
    options = [*COMMON, *POLICIES["nvme"], f"memory.folder={tmp_path}", "trainer.checkpoint_every=1"]
    # Of every step, as where its tensors are larger than those of the step before.
    disk_full_after_a_step.setattr(NvmeTier, "allocate_waiting", NvmeTier.allocate)
    with pytest.raises(OutputError, match=r"No space left on device.*checkpoints written so far are intact"):
        here(data, out, *options)
    disk_full_after_a_step.undo()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000001"]
    assert here(data, out, *COMMON, *POLICIES["auto"])
    assert losses(out) == losses(plain)
    ours, theirs = weights(out), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_second_step_needs_no_new_room_on_the_disk(
    unmanaged: tuple[Path, Path], tmp_path: Path, disk_full_after_a_step: pytest.MonkeyPatch
):
    data, plain = unmanaged
    options = [*COMMON, *POLICIES["nvme"], f"memory.folder={tmp_path}", "trainer.checkpoint_every=1"]
    assert here(data, tmp_path / "run", *options)
    assert losses(tmp_path / "run") == losses(plain)


def test_what_does_not_go_together_is_refused(unmanaged: tuple[Path, Path], tmp_path: Path):
    """A budget that no operator fits in, compiled blocks, and what is not a policy."""
    data, _ = unmanaged
    with pytest.raises(BudgetError, match=r"a budget of 1,000 bytes is too small.*take [0-9,]+ bytes"):
        here(data, tmp_path / "a", *COMMON, "memory=gemini", "memory.budget=1000B")
    with pytest.raises(ConfigError, match=r"memory\.policy does not support trainer\.compile"):
        here(data, tmp_path / "b", *COMMON, "memory=gemini", "trainer.compile=true")
    with pytest.raises(ConfigError, match=r"memory\.policy must be one of auto, cuda, cpu, nvme"):
        compose_config(["memory=gemini", "memory.policy=gpu", "data.directory=x", "trainer.out=y"])
