"""Runs of the example GPT with and without management, for comparison bit by bit."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import examples.gpt.gpt as gpt
from fastfold.memory import Gemini, GeminiConfig


def build(**changes: Any) -> nn.Module:
    """A small GPT; equal arguments give equal parameters."""
    sizes = {
        "layers": 3,
        "width": 16,
        "heads": 2,
        "vocabulary": 24,
        "context": 8,
        "checkpointing": "block",
    } | changes
    torch.manual_seed(0)
    return gpt.GPT(gpt.GPTConfig(**sizes))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def tokens(step: int, length: int = 8) -> Tensor:
    return torch.randint(0, 24, (1, length), generator=torch.Generator().manual_seed(step))


class Plain:
    """An unmanaged run with the manager's interface."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad

    def loss_step(self, step: int, passes: int = 1, length: int = 8) -> float:
        return _loss_step(self, step, passes, length)


class Managed(Plain):
    """A managed run on the simulated device, every operator counted."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer)
        self.manager = Gemini(model, optimizer, GeminiConfig(**options))
        self.step, self.zero_grad = self.manager.step, self.manager.zero_grad

    def loss_step(self, step: int, passes: int = 1, length: int = 8) -> float:
        with self.manager.device.running():
            return _loss_step(self, step, passes, length)


@functools.cache
def plain_run(
    steps: int, *, passes: tuple[int, ...] = (), length: int = 8, checkpointing: str = "block", **sizes: int
) -> tuple[list[float], Plain]:
    """Losses of an unmanaged run, and the run after its last step, to be read only."""
    model = build(checkpointing=checkpointing, **sizes)
    run = Plain(model, adam(model))
    counts = passes or (1,) * steps
    return [run.loss_step(i, count, length) for i, count in enumerate(counts[:steps])], run


def _loss_step(run: Plain, step: int, passes: int, length: int) -> float:
    """One training step: some passes without gradients feed the last one, as recycling does."""
    sequence = tokens(step, length)
    extra = torch.zeros(())
    for _ in range(passes - 1):
        with torch.no_grad():
            extra = run.model(sequence).mean() + 0.5 * extra
    loss = gpt.next_token_loss(run.model(sequence) * (1 + 0.1 * extra), sequence)
    loss.backward()
    run.step()
    run.zero_grad()
    return loss.item()
