"""Compare the cost model with published throughputs of language models.

Usage: python -m benchmarks.published_models

The values, with their sources, are in ``published_models.json``. They are of other programs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt.gpt import GPTConfig
from examples.gpt.plan import gpt_workload
from fastfold.parallel import ParallelPlan
from fastfold.parallel.planner.cost_model import step_cost
from fastfold.parallel.planner.hardware import GENERAL, rates
from fastfold.parallel.planner.workload import Repeat, Workload, standard_layouts

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
WITHIN: float = _TABLE["within"]
SOURCES: dict[str, str] = _TABLE["sources"]


@dataclass(frozen=True)
class PublishedModel:
    """Published throughput of a language model under data parallelism.

    Attributes:
        name: Model.
        source: Key of ``SOURCES``.
        gpu: Name of the accelerator.
        gpus: Number of GPUs.
        layers: Number of blocks.
        width: Channels of the residual stream.
        heads: Attention heads.
        vocabulary: Number of tokens.
        context: Length of a sequence.
        micro: Sequences that a GPU runs at once.
        samples: Sequences of a step.
        checkpointing: True if blocks are computed again in the backward pass.
        tokens_per_second: Published throughput of a GPU.
        fitted: True if constants were fitted to it; the others only check them.
        zero: Stage of ZeRO.
        llama: True for a Llama, False for a GPT.
        kv_heads: Heads of keys and values of a Llama.
        hidden: Hidden channels of a Llama's perceptron.
    """

    name: str
    source: str
    gpu: str
    gpus: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    micro: int
    samples: int
    checkpointing: bool
    tokens_per_second: float
    fitted: bool
    zero: int = 3
    llama: bool = False
    kv_heads: int = 0
    hidden: int = 0


PUBLISHED = tuple(PublishedModel(**row) for row in _TABLE["rows"])


class _LlamaBlock(nn.Module):
    """Block of a Llama without rotation of its queries and keys."""

    def __init__(self, of: PublishedModel) -> None:
        super().__init__()
        self.heads, self.kv_heads, head = of.heads, of.kv_heads, of.width // of.heads
        self.norms = nn.ModuleList(nn.RMSNorm(of.width) for _ in range(2))
        self.q, self.output = (nn.Linear(of.width, of.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(of.width, of.kv_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(of.width, of.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(of.hidden, of.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream ``[batch, tokens, width]`` after this block."""
        normed = self.norms[0](x)
        q = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(normed).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for part in (self.k, self.v))
        times = self.heads // self.kv_heads
        mixed = F.scaled_dot_product_attention(
            q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), is_causal=True
        )
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class _Llama(nn.Module):
    def __init__(self, of: PublishedModel) -> None:
        super().__init__()
        self.tokens = nn.Embedding(of.vocabulary, of.width)
        self.block, self.norm = _LlamaBlock(of), nn.RMSNorm(of.width)
        self.head = nn.Linear(of.width, of.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of ``tokens [batch, tokens]``."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.head(self.norm(self.block(self.tokens(tokens))))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def _workload(of: PublishedModel) -> Workload:
    if not of.llama:
        config = GPTConfig(of.vocabulary, of.context, of.layers, of.heads, of.width)
        return gpt_workload(config, samples=of.samples, micro=of.micro)
    return Workload(
        name=of.name,
        build=lambda mesh: _Llama(of),
        loss=lambda model: model(torch.zeros(of.micro, of.context, dtype=torch.int64)),
        samples=of.samples,
        stacks={"block": Repeat(of.layers)},
        layouts=standard_layouts(),
        rows=lambda _: of.micro,
    )


def predict(of: PublishedModel) -> float:
    """Return the cost model's tokens per second of a GPU."""
    plan = ParallelPlan(dp=of.gpus, zero=of.zero)
    cost = step_cost(_workload(of), plan, rates(of.gpu, GENERAL), checkpointing=of.checkpointing)
    return of.samples * of.context / cost.seconds / of.gpus


def main() -> None:
    """Print the comparison as Markdown."""
    print("| model | GPUs | published tokens/s/GPU | model | model / published | constants | source |")
    print("|---|---|---|---|---|---|---|")
    for of in PUBLISHED:
        found = predict(of)
        ratio = found / of.tokens_per_second
        print(
            f"| {of.name} | {of.gpus} {of.gpu} | {of.tokens_per_second:,.0f} | {found:,.0f} | {ratio:.2f} "
            f"| {'fitted to it' if of.fitted else 'checked'} | {of.source} |"
        )
    for name, source in SOURCES.items():
        print(f"\n* {name}: {source}.")


if __name__ == "__main__":
    main()
