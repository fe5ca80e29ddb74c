"""Peaks, times and search times of modules under ``fastfold.memory.autochunk``.

Peaks are those that the simulated device measures, with inputs and results, without parameters. The Evoformer block is
compared with its hand-made plan: in place, in the block sizes and channels with the lowest peak.

    python benchmarks/autochunk.py [--openfold DIR] [--json FILE] [--markdown FILE]

Times are those of one thread's processor, in turns with the module without chunks. With DIR, a checkout of OpenFold,
its Evoformer block is measured too.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import against_openfold
from benchmarks.kernels.block import block_config
from benchmarks.parallel import machine
from fastfold.evoformer import EvoformerBlock, ExecutionPolicy
from fastfold.evoformer.execution import set_policy
from fastfold.kernels.decompositions import decompositions
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from fastfold.memory import BudgetError, SimulatedDevice, autochunk
from fastfold.utils.atomic_files import write_atomic

HAND = (1.2, 1.1)
"""Budgets of the Evoformer block, relative to its peak by hand."""
FRONTIER = (0.4, 0.3, 0.25, 0.2)
"""Budgets of the modules of the frontier, relative to their peaks."""
ROUNDS = 5
MIB = 2**20


class Causal(nn.Module):
    """GPT block of PyTorch's own layers."""

    def __init__(self, c: int, heads: int, length: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            c, heads, 4 * c, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.register_buffer("later", torch.full((length, length), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, N, c]`` to the same shape."""
        return self.layer(x, src_mask=self.later)


class Vision(nn.Module):
    """Vision transformer: patches, a class token, layers, a head."""

    def __init__(self, c: int, heads: int, layers: int, size: int, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, c, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, c))
        self.place = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, c))
        layer = nn.TransformerEncoderLayer(c, heads, 4 * c, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(c, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Map ``[B, 3, size, size]`` to ``[B, 1000]``."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.layers(x)[:, 0])


class TriangleAttention(nn.Module):
    """Triangle attention as OpenFold writes it: logits of all heads and rows at once (supplement Algorithm 13)."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(c)
        self.query, self.key, self.value = (nn.Linear(c, c, bias=False) for _ in range(3))
        self.bias, self.gate, self.out = nn.Linear(c, heads, bias=False), nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, pair: Tensor, mask: Tensor) -> Tensor:
        """Map ``pair [N, N, c]`` with ``mask [N, N]`` to ``[N, N, c]``."""
        x = self.norm(pair)
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )
        logits = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        logits = logits + self.bias(x).permute(2, 0, 1) + 1e9 * (mask[:, None, None, :] - 1)
        found = (logits.softmax(-1) @ value).transpose(-2, -3).flatten(-2)
        return pair + self.out(torch.sigmoid(self.gate(x)) * found)


@dataclass(frozen=True)
class Row:
    """Line of the table; bytes are without parameters.

    Attributes:
        module: Name and size of the module.
        budget: Budget in bytes.
        whole: Peak without chunks, or for the Evoformer block by hand, in place.
        peak: Peak in chunks.
        regions: Number of parts that run in chunks.
        search: Seconds of processor time that ``autochunk`` took, with the export.
        slower: Processor time in chunks over that without, medians of alternate runs.
        apart: Largest difference of the results, over the largest result.
    """

    module: str
    budget: int
    whole: int
    peak: int
    regions: int
    search: float
    slower: float
    apart: float


def row(
    name: str, module: nn.Module, args: tuple[Tensor, ...], budget: int, whole: int, **options: Any
) -> Row:
    """Chunk a module, run it, and compare it with the module without chunks."""
    start = time.process_time()
    chunked = autochunk(module, args, budget, **options)
    search = time.process_time() - start
    times: dict[Any, list[float]] = {module: [], chunked: []}
    results = {}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for which, seconds in times.items():
                fresh = [x.clone() for x in args]
                start = time.process_time()
                results[which] = which(*fresh)
                seconds.append(time.process_time() - start)
    plain, cut = (statistics.median(seconds) for seconds in times.values())
    pairs = list(zip(_flat(results[module]), _flat(results[chunked]), strict=True))
    apart = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    plan = chunked.plan
    return Row(name, budget, whole, plan.peak, len(plan.regions), search, cut / plain, apart)


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def general() -> list[Row]:
    """Measure modules without support for chunks."""
    cases: list[tuple[str, Callable[[], nn.Module], tuple[Tensor, ...]]] = [
        ("GPT block, 1 x 1,024 x 256", lambda: Causal(256, 8, 1024), (torch.randn(1, 1024, 256),)),
        (
            "vision transformer, 4 layers, 8 x 224 x 224",
            lambda: Vision(192, 3, 4, 224),
            (torch.randn(8, 3, 224, 224),),
        ),
        (
            "triangle attention as in OpenFold, 128 residues",
            lambda: TriangleAttention(64, 4),
            (torch.randn(128, 128, 64), torch.ones(128, 128)),
        ),
    ]
    rows = []
    for name, make, args in cases:
        module = make().eval()
        whole, least = autochunk(module, args, 1 << 62).plan.peak_before, smallest(module, args)
        rows += [row(name, module, args, budget, whole) for budget in (max(least, whole // 2), least)]
    return rows


class OpenFoldBlock(nn.Module):
    """Evoformer block of OpenFold in evaluation mode, without its own chunks."""

    def __init__(self, checkout: Path, case: against_openfold.Case) -> None:
        super().__init__()
        self.block = against_openfold.OpenFoldBlocks(checkout, case).modules[0]

    def forward(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Map ``msa [S, N, 256]`` and ``pair [N, N, 128]`` to the same shapes."""
        msa, pair = self.block(msa, pair, msa_mask, pair_mask)
        return msa, pair


def frontier(checkout: Path | None) -> list[Row]:
    """Measure shrinking budgets; those that are too small are replaced by the smallest that works."""
    cases: list[tuple[str, nn.Module, tuple[Tensor, ...]]] = [
        (
            "vision transformer, 4 layers, 2 x 1,025 tokens",
            Vision(192, 3, 4, 256, patch=8),
            (torch.randn(2, 3, 256, 256),),
        )
    ]
    if checkout is not None:
        case = against_openfold.Case(1, 64, 128)
        name = "OpenFold's Evoformer block, 128 residues, 64 rows"
        cases.append((name, OpenFoldBlock(checkout, case), against_openfold.make_inputs(case)))
    rows = []
    for name, module, args in cases:
        module.eval()
        whole = autochunk(module, args, 1 << 62).plan.peak_before
        for share in FRONTIER:
            try:
                rows.append(row(name, module, args, int(share * whole), whole))
            except BudgetError as refused:
                rows.append(row(name, module, args, refused.smallest, whole))
                break
    return rows


def smallest(module: nn.Module, args: tuple[Tensor, ...]) -> int:
    """Return the smallest feasible budget in bytes."""
    try:
        autochunk(module, args, 1)
    except BudgetError as refused:
        return refused.smallest
    raise AssertionError("one byte was enough")


def evoformer(residues: int, depth: int) -> list[Row]:
    """Measure an Evoformer block against its hand-made plan."""
    block = EvoformerBlock(block_config(), 256, 128, zero_init=False).eval()
    args = (
        torch.randn(depth, residues, 256),
        torch.randn(residues, residues, 128),
        torch.ones(depth, residues),
        torch.ones(residues, residues),
    )
    hand = min(by_hand(block, args, 1 << log, channels) for log in (16, 17, 18) for channels in (1, 8))
    name = f"Evoformer block, {residues} residues, {depth} rows"
    own = {"donate": True, "decompositions": decompositions()}
    return [row(name, block, args, int(share * hand), hand, **own) for share in HAND]


def by_hand(block: EvoformerBlock, args: tuple[Tensor, ...], elements: int, channels: int) -> int:
    """Return the peak in bytes of a block in place.

    Args:
        block: Evoformer block.
        args: Inputs of the block.
        elements: Elements per block of positions.
        channels: Channels of triangle factors at a time.
    """
    block = copy.deepcopy(block).to("meta")
    contraction = ContractionPlan(channels=channels)
    set_policy(block, ExecutionPolicy(block_elements=elements, inplace=True, contraction=contraction))
    device = SimulatedDevice(1 << 62, "meta")
    for parameter in block.parameters():
        device.on_host(parameter)
    inputs = [torch.empty_like(x, device="meta") for x in args]
    for x in inputs:
        device.hold(x)
    with device.running(), torch.no_grad():
        block(*inputs)
    return device.mark()


def table(rows: list[Row]) -> str:
    """Format the rows as Markdown."""
    lines = [
        "# AutoChunk",
        "",
        f"Machine: {machine()}; one thread, float32.",
        "Peaks in MiB as the simulated device measures them, inputs and results included, parameters not. Without",
        "chunks: for the Evoformer block the best plan made by hand, in place. Times are those of the processor.",
        "",
        "| module | without chunks | budget | peak in chunks | parts in chunks | time over that without | results "
        "apart by | search |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for x in rows:
        lines.append(
            f"| {x.module} | {x.whole / MIB:.1f} | {x.budget / MIB:.1f} ({x.budget / x.whole:.2f}) | "
            f"{x.peak / MIB:.1f} ({x.peak / x.whole:.2f}) | {x.regions} | {x.slower:.2f} | {x.apart:.1e} | "
            f"{x.search:.1f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--openfold", type=Path, metavar="DIR", help="checkout of OpenFold, for its block")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = general() + frontier(options.openfold) + evoformer(160, 16)
    text = table(rows)
    print(text)
    if options.json:
        write_atomic(options.json, json.dumps([asdict(x) for x in rows], indent=1) + "\n")
    if options.markdown:
        write_atomic(options.markdown, text)


if __name__ == "__main__":
    main()
