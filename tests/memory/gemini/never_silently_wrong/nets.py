"""A small network, plain and managed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastfold.memory import Gemini, GeminiConfig

POLICIES = ["auto", "cpu", "nvme", "cuda"]
AWAY = ["auto", "cpu", "nvme"]


class Net(nn.Module):
    """An encoder, a scale of its own and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.ones(6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.encoder(x) * self.scale))  # type: ignore[no-any-return]


def x_of(step: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def managed(policy: str = "auto", **options: Any) -> tuple[Net, Gemini]:
    """One chunk for each module."""
    model = Net()
    return model, Gemini(model, adam(model), GeminiConfig(budget=1 << 14, policy=policy, **options))


def backward(model: nn.Module, step: int = 0) -> None:
    model(x_of(step)).square().sum().backward()
