"""A training run that writes its state after every step, to be killed from outside."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.memory.gemini.gpt_runs import Managed, adam, build
from tests.memory.gemini.test_manager import budget_of


def train(policy: str, folder: Path) -> None:
    """Train for a thousand steps."""
    model = build()
    run = Managed(model, adam(model), budget=budget_of(policy), policy=policy, nvme_folder=folder / "scratch")
    for step in range(1000):
        loss = run.loss_step(step)
        temporary = folder / "state.tmp"
        torch.save({"state": run.manager.state_dict(), "step": step, "loss": loss}, temporary)
        os.replace(temporary, folder / f"state{step}.pt")
