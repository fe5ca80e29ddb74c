"""Transfers of a training step under ``fastfold.memory.Gemini``, and waits for them, on the simulated device.

Budgets are shares of the memory of a plain step, parameters and activations together. ``lookahead`` is the number of
operators ahead of their use at which parameters and saved tensors may begin to load; without it every load is waited
for.

    python benchmarks/gemini.py [--json FILE] [--markdown FILE]
    python benchmarks/gemini.py --times

The second command compares settled steps with plain ones, which take turns, by processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels.block import block_config
from examples.gpt.gpt import GPT, GPTConfig, next_token_loss
from fastfold.evoformer import EvoformerBlock
from fastfold.memory import BudgetError, DeviceFull, Gemini, GeminiConfig, SimulatedDevice
from fastfold.utils.atomic_files import write_atomic

SHARES = (0.3, 0.4, 0.6, 0.8)
SETTLED = 4
"""Number of steps after which a plan is followed."""


class Stack(nn.Module):
    """Evoformer blocks with a loss of their outputs."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            EvoformerBlock(block_config(), 32, 16, zero_init=False) for _ in range(blocks)
        )

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        """Map ``[S, N, 32]`` and ``[N, N, 16]`` to a scalar."""
        masks = torch.ones(msa.shape[:-1]), torch.ones(pair.shape[:-1])
        for block in self.blocks:
            msa, pair = block(msa, pair, *masks)
        return msa.square().mean() + pair.square().mean()


@dataclass(frozen=True)
class Step:
    """Settled step.

    Attributes:
        model: Name of the trained model.
        recompute: True if its blocks may be recomputed.
        share: Budget, relative to a plain step's memory.
        lookahead: See the module's text.
        peak: Peak memory on the device, relative to the budget.
        loads: Number of loads of a chunk of parameters to the device.
        loads_waited: Number of loads that began at their use.
        sent: Bytes of saved tensors that went to the host and came back.
        sent_waited: Bytes that began to come back at their use.
        recomputed: Number of blocks that were computed again.
    """

    model: str
    recompute: bool
    share: float
    lookahead: int
    peak: float
    loads: int
    loads_waited: int
    sent: int
    sent_waited: int
    recomputed: int


Built = tuple[nn.Module, Callable[[nn.Module], Tensor]]
"""Model, and its loss."""


def _whole(build: Callable[[], Built]) -> int:
    """Return the bytes of a plain step, parameters and activations together."""
    model, loss = build()
    plain = SimulatedDevice(1 << 40)
    with plain.running():
        loss(model).backward()
    return plain.mark() + sum(p.nbytes for p in model.parameters())


def measure(name: str, build: Callable[[], Built], *, recompute: bool) -> list[Step]:
    """Measure a model under several budgets, with and without lookahead; infeasible budgets are left out."""
    whole = _whole(build)
    found = []
    for share in SHARES:
        for lookahead in (0, 2):
            try:
                found.append(_settled(name, build, int(share * whole), share, lookahead, recompute))
            except (BudgetError, DeviceFull):
                print(f"{name}: {share} of the memory is not enough", file=sys.stderr)
    return found


def _settled(
    name: str, build: Callable[[], Built], budget: int, share: float, lookahead: int, recompute: bool
) -> Step:
    model, loss = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    blocks: Sequence[nn.Module] = list(model.blocks) if recompute else ()
    config = GeminiConfig(budget, device=SimulatedDevice(budget), recompute=blocks, lookahead=lookahead)
    manager = Gemini(model, optimizer, config)
    saved, residency, store = manager.saved, manager.residency, manager.store
    assert saved is not None
    before, after = (0,) * 5, (0,) * 5
    for _ in range(SETTLED + 1):
        with manager.device.running():
            loss(model).backward()
        manager.step()
        manager.zero_grad()
        before = after
        after = (store.loads, residency.waited, saved.sent, saved.waited, saved.recomputed)
    counts = (b - a for a, b in zip(before, after, strict=True))
    return Step(name, recompute, share, lookahead, manager.device.peak / budget, *counts)


def times_of_plain(build: Callable[[], Built], share: float, rounds: int = 12) -> float:
    """Return the processor time of a settled step within a budget, as the median multiple of a plain step's."""
    budget, (plain, plain_loss), (model, loss) = int(share * _whole(build)), build(), build()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    config = GeminiConfig(budget, device=SimulatedDevice(budget))
    manager = Gemini(model, torch.optim.AdamW(model.parameters()), config)
    ratios = []
    for _ in range(SETTLED + 2 + rounds):
        start = time.process_time()
        plain_loss(plain).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        middle = time.process_time()
        with manager.device.running():
            loss(model).backward()
        manager.step()
        manager.zero_grad()
        ratios.append((time.process_time() - middle) / (middle - start))
    return statistics.median(ratios[-rounds:])


def gpt() -> Built:
    """Build eight blocks of GPT on 128 tokens."""
    torch.manual_seed(0)
    sizes = {"layers": 8, "width": 64, "heads": 4, "vocabulary": 64, "context": 128}
    tokens = torch.randint(0, 64, (1, 128))
    return GPT(GPTConfig(**sizes)), lambda model: next_token_loss(model(tokens), tokens)


def evoformer() -> Built:
    """Build four Evoformer blocks on an MSA of 16 x 64."""
    torch.manual_seed(0)
    msa, pair = torch.randn(16, 64, 32), torch.randn(64, 64, 16)
    return Stack(4).train(), lambda model: model(msa, pair)


def table(rows: Sequence[Step]) -> str:
    """Format the table as Markdown."""
    lines = [
        "# Gemini: transfers of a step, and waits for them",
        "",
        "Counted on the simulated device, in a step whose plan has settled. Budgets are shares of the memory of a",
        "plain step. Chunks are parameters that come to the device; saved tensors go to the host and come back.",
        "",
        "| model | blocks may be recomputed | budget | lookahead | peak in the budget | chunks | waited for | "
        "KiB of saved tensors | waited for | blocks recomputed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for x in rows:
        lines.append(
            f"| {x.model} | {'yes' if x.recompute else 'no'} | {x.share:.1f} | {x.lookahead} | {x.peak:.2f} | "
            f"{x.loads} | {x.loads_waited} | {x.sent / 1024:.0f} | {x.sent_waited / 1024:.0f} | {x.recomputed} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", action="store_true", help="compare times with plain steps")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args()
    models = (("GPT", gpt), ("Evoformer", evoformer))
    if options.times:
        for name, build in models:
            for share in (3.0, 0.8, 0.5):
                try:
                    print(
                        f"{name}, budget {share:.1f}: {times_of_plain(build, share):.2f} times a plain step"
                    )
                except (BudgetError, DeviceFull):
                    print(f"{name}, budget {share:.1f}: not enough")
        return
    rows = [
        row
        for name, build in models
        for recompute in (False, True)
        for row in measure(name, build, recompute=recompute)
    ]
    text = table(rows)
    print(text)
    if options.json:
        found = {"steps": [asdict(x) for x in rows]}
        write_atomic(options.json, json.dumps(found, indent=1) + "\n")
    if options.markdown:
        write_atomic(options.markdown, text)


if __name__ == "__main__":
    main()
