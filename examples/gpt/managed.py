"""A GPT whose parameters alone are twenty times the memory that it may take, trained by one line of fastfold.memory.

    python -m examples.gpt.managed --budget 1MiB --steps 5 --policy auto

Without a GPU the device is simulated: it has that budget and no more, and an operator that would exceed it fails.
"""

from __future__ import annotations

import argparse

import torch

from examples.gpt.gpt import GPT, GPTConfig, next_token_loss
from fastfold.memory import Gemini, GeminiConfig, parse_bytes


def network(budget: int, times: float = 20.0) -> GPT:
    """A GPT with at least ``times * budget`` bytes of parameters: many small blocks, of which several fit."""
    width = max(16, int((budget / 500) ** 0.5) // 8 * 8)
    per_block = 12 * width * width * 4
    config = GPTConfig(layers=int(times * budget / per_block) + 1, width=width, heads=2, context=16)
    return GPT(config)


def main() -> None:
    """Train it on random tokens and print what happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", default="1MiB", help="memory of the device for parameters and activations"
    )
    parser.add_argument("--policy", default="auto", help="auto, cpu, nvme or cuda")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    budget = parse_bytes(args.budget)
    model = network(budget)
    size = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = GeminiConfig(budget, args.policy, recompute=list(model.blocks))
    manager = Gemini(model, optimizer, config)
    print(f"{len(model.blocks)} blocks, {size:,} bytes of parameters, {size / budget:.1f} times the budget")
    tokens = torch.randint(0, model.config.vocabulary, (1, 16), device=manager.device.device)
    for step in range(args.steps):
        before = manager.device.received
        with manager.device.running():
            loss = next_token_loss(model(tokens), tokens)
            loss.backward()
        manager.step()
        manager.zero_grad()
        print(
            f"step {step}: loss {loss.item():.4f}, {manager.device.received - before:,} bytes of parameters loaded, "
            f"at most {manager.device.peak:,} of {budget:,} bytes in use"
        )


if __name__ == "__main__":
    main()
