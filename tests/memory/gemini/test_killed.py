"""What happens when the machine does not play along: killed processes and full disks."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from fastfold.errors import OutputError
from fastfold.memory import NvmeTier
from tests.helpers.forked import Forked
from tests.memory.gemini.gpt_runs import Managed, adam, build, plain_run
from tests.memory.gemini.killed_run import train
from tests.memory.gemini.test_manager import TIGHT, budget_of


@pytest.mark.parametrize(
    ("policy", "other"),
    [
        pytest.param("nvme", "auto", marks=pytest.mark.long),
        pytest.param("auto", "nvme", marks=pytest.mark.slow),
        pytest.param("cpu", "cuda", marks=pytest.mark.slow),
        pytest.param("cuda", "nvme", marks=pytest.mark.slow),
    ],
)
def test_killed_without_warning_a_run_goes_on_under_any_policy(policy: str, other: str, tmp_path: Path):
    """SIGKILL at any moment: the last state that was written goes on bit by bit, and no file of the tier is left."""
    (tmp_path / "scratch").mkdir()
    process = Forked(train, policy, tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    end = time.monotonic() + 300
    while not (tmp_path / "state1.pt").exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "scratch").iterdir()) == []
    newest = max(tmp_path.glob("state*.pt"), key=lambda path: int(path.stem.removeprefix("state")))
    saved = torch.load(newest, weights_only=True)
    model = build()
    run = Managed(model, adam(model), budget=budget_of(other), policy=other)
    run.manager.load_state_dict(saved["state"])
    expected, _ = plain_run(saved["step"] + 3)
    assert saved["loss"] == expected[saved["step"]]
    assert [run.loss_step(saved["step"] + i) for i in (1, 2)] == expected[-2:]


@pytest.fixture
def files_of_at_most_a_page(monkeypatch: pytest.MonkeyPatch):
    """The system refuses to make files longer than this, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_a_clear_error(tmp_path: Path, files_of_at_most_a_page: None):
    """The system's own refusal, not a pretended one; it comes when room is reserved, and not as a signal later."""
    assert NvmeTier(tmp_path).allocate(1000, torch.float32).sum() == 0
    with pytest.raises(
        OutputError, match=r"cannot reserve 40,000 bytes for the memory tier on this disk.*Free some space"
    ):
        NvmeTier(tmp_path).allocate(10_000, torch.float32)
    model = build()
    with pytest.raises(OutputError, match="checkpoints written so far are intact"):
        Managed(model, adam(model), budget=TIGHT, policy="nvme", nvme_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
