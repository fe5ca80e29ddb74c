"""Train a model that is larger than its device, with one line.

    python examples/gemini_my_model.py [--budget 2MiB] [--policy auto]

Parameters, gradients and optimizer states stay on the host; what an operator needs comes to the device in time.
Without a GPU the device is simulated: it has that budget, and an operator that would exceed it fails.
``examples/gpt/managed.py`` does the same with a GPT of twenty times its budget.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn

from fastfold.memory import Gemini, GeminiConfig, parse_bytes


def main() -> None:
    """Three managed steps, and the same three without Gemini."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="2MiB", help="memory of the device")
    parser.add_argument("--policy", default="auto", help="auto, cpu or nvme")
    args = parser.parse_args()
    budget = parse_bytes(args.budget)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(80)]
    model = nn.Sequential(*layers, nn.Linear(128, 1))
    plain = copy.deepcopy(model)
    x, target = torch.randn(16, 128), torch.randn(16, 1)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    manager = Gemini(model, optimizer, GeminiConfig(budget=budget, policy=args.policy))
    batch, wanted = x.to(manager.device.device), target.to(manager.device.device)
    size = sum(p.nbytes for p in model.parameters())
    print(f"{size:,} bytes of parameters, and three times as much with Adam's states; a budget of {budget:,}")
    for step in range(3):
        with manager.device.running():  # counts what the simulated device holds; a GPU needs no such line
            loss = (model(batch) - wanted).square().mean()
            loss.backward()
        manager.step()
        manager.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}, at most {manager.device.peak:,} bytes on the device")

    alone = torch.optim.Adam(plain.parameters(), lr=1e-3)
    for _ in range(3):
        loss = (plain(x) - target).square().mean()
        alone.zero_grad()
        loss.backward()
        alone.step()
    state = manager.state_dict()["model"]
    worst = max((state[name].cpu() - value).abs().max().item() for name, value in plain.state_dict().items())
    print(f"weights differ from those of a plain run by {worst:.1e}")


if __name__ == "__main__":
    main()
