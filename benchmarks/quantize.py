"""Memory, time and error of models in 8 bits (:func:`fastfold.quantize`) against float32, with random weights.

Usage: python benchmarks/quantize.py [--repeats 5] [--json OUT]

GPT of GPT-2's smallest size on 256 tokens, a vision transformer of 12 layers of 768 channels on 196 patches, and a
linear layer. Passes of both kinds alternate, and the best of each is taken.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastfold
from examples.gpt.gpt import GPT, GPTConfig
from fastfold.utils.atomic_files import write_atomic


class SelfAttention(nn.Module):
    """Self-attention ``[*, N, c]`` with linear projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within ``x [*, N, c]``."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        return self.output(nn.functional.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


class Residual(nn.Module):
    """Normalisation and a module, added to the input."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + inner(norm(x))``, ``[*, N, c]``."""
        return x + self.inner(self.norm(x))


def vit(width: int = 768, layers: int = 12) -> nn.Module:
    """Return a vision transformer without its convolution: patches ``[*, 196, 768]`` to classes."""
    blocks: list[nn.Module] = [nn.Linear(768, width)]
    for _ in range(layers):
        blocks.append(Residual(width, SelfAttention(width, 12)))
        wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        blocks.append(Residual(width, wide))
    return nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, 1000))


def best(calls: dict[str, Any], repeats: int) -> dict[str, float]:
    """Return the shortest seconds of each call, which alternate."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    torch.manual_seed(0)
    small = GPTConfig(vocabulary=50257, context=256, layers=12, heads=12, width=768)
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        "GPT, 12 x 768, 256 tokens": (GPT(small), torch.randint(0, 50257, (1, 256))),
        "ViT, 12 x 768, 196 patches": (vit(), torch.randn(1, 196, 768)),
        "linear, 1024 -> 4096, 512 rows": (nn.Sequential(nn.Linear(1024, 4096)), torch.randn(512, 1024)),
    }
    rows = []
    print("| model | parameters | in 8 bits | time of float32 | of 8 bits | times faster | error |")
    print("|---|---|---|---|---|---|---|")
    for name, (model, batch) in cases.items():
        exact = copy.deepcopy(model).eval()
        report = fastfold.quantize(model.eval(), "int8", [batch])
        with torch.inference_mode():
            pair = {"float32": lambda m=exact, x=batch: m(x), "int8": lambda m=model, x=batch: m(x)}
            found = best(pair, options.repeats)
        mib = [x / 2**20 for x in (report.bytes_before, report.bytes_after)]
        rows.append({"model": name, "mib": mib, "seconds": found, "errors": dict(report.errors)})
        print(
            f"| {name} | {mib[0]:.1f} MiB | {mib[1]:.1f} MiB | {found['float32'] * 1e3:.1f} ms | "
            f"{found['int8'] * 1e3:.1f} ms | {found['float32'] / found['int8']:.1f} | "
            f"{max(report.errors.values()):.1%} |",
            flush=True,
        )
    if options.json is not None:
        write_atomic(options.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
