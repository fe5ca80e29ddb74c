"""torchrun starts killed processes again: they meet again, go on from the checkpoint, and end with equal weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY

STEPS, KILLED = 6, 3
PROGRAM = f"""
import os, signal, sys, time
import torch
from datetime import timedelta
from pathlib import Path
from fastfold.parallel import ParallelPlan, init_distributed

out = Path(sys.argv[1])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt and rank == 0:
    time.sleep(3)  # the other one would find the address of the dead process first
weight, step = torch.zeros(3), 0
if (out / "checkpoint.pt").exists():
    step, weight = torch.load(out / "checkpoint.pt", weights_only=True)
with init_distributed(ParallelPlan(dp=2), torch.device("cpu"), timeout=timedelta(seconds=20)) as context:
    while step < {STEPS}:
        if (attempt, rank, step) == (0, 1, {KILLED}):
            os.kill(os.getpid(), signal.SIGKILL)
        parts = context.gather(torch.full((3,), float(rank + step)))
        weight, step = weight + sum(parts), step + 1
        if rank == 0:
            torch.save((step, weight), out / "new.pt")
            os.replace(out / "new.pt", out / "checkpoint.pt")
        context.barrier()
torch.save((attempt, weight), out / f"rank{{rank}}.pt")
"""


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_all_end_with_equal_weights(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ends = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    # Each step adds the sum of both ranks' numbers, 2 * step + 1.
    expected = torch.full((3,), float(sum(2 * step + 1 for step in range(STEPS))))
    for attempt, weight in ends:
        assert attempt == 1
        assert torch.equal(weight, expected)
