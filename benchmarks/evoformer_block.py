"""Speed and memory of one Evoformer block on this machine.

Usage: python benchmarks/evoformer_block.py [--rounds N] [--json OUT]

Speed is the block's counted floating-point operations per second over the machine's own float32 matrix-product rate,
both measured in turns in one run: medians of ratios, because absolute times vary on a shared machine. The rate is that
of PyTorch's default. In a fold, a block overwrites its inputs and uses oneDNN's products on AMD's processors; so do the
passes in bfloat16 and in 8 bits, whose time includes a copy of the inputs. Memory is the peak of the process's resident
set (Linux, VmHWM, reset before the pass) above that with the inputs in place, in U: the size of the pair tensor,
N² · c_z · 4 bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import torch  # noqa: E402

from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.evoformer import EvoformerBlock  # noqa: E402
from fastfold.evoformer.execution import ExecutionPolicy, set_policy  # noqa: E402
from fastfold.inference.planning.planner import FOLDING_POLICY  # noqa: E402
from fastfold.kernels.cpu.linear import Products, reduced_products  # noqa: E402
from fastfold.kernels.cpu.products import exact_products  # noqa: E402
from fastfold.products.design.gradient_report import product_rate  # noqa: E402
from fastfold.utils.machine import process_memory  # noqa: E402

ROWS, RESIDUES, C_M, C_Z = 128, 256, 256, 128
TARGETS = {
    "forward": 0.65,
    "forward_in_a_fold": 0.65,
    "forward_backward": 0.45,
    "forward_bf16_products": 1.0,
    "forward_int8": 1.0,
}
MEMORY_TARGET = 6.0


def forward_flops(rows: int = ROWS, residues: int = RESIDUES, c_m: int = C_M, c_z: int = C_Z) -> int:
    """Return operations of one forward pass: two per multiply-add of every matrix product."""
    s, r, c = rows, residues, 32
    row = 5 * 2 * s * r * c_m * c_m + 2 * 2 * s * r * r * c_m + 2 * r * r * c_z * 8
    column = 5 * 2 * s * r * c_m * c_m + 2 * 2 * r * s * s * c_m
    msa_transition = 2 * 2 * s * r * c_m * 4 * c_m
    outer = 2 * 2 * s * r * c_m * c + 2 * s * (r * c) ** 2 + 2 * r * r * c * c * c_z
    multiplication = 2 * (6 * 2 * r * r * c_z * c_z + 2 * r**3 * c_z)
    attention = 2 * (5 * 2 * r * r * c_z * c_z + 2 * 2 * r**3 * c_z + 2 * r * r * c_z * 4)
    pair_transition = 2 * 2 * r * r * c_z * 4 * c_z
    return row + column + msa_transition + outer + multiplication + attention + pair_transition


def setup() -> tuple[EvoformerBlock, tuple[torch.Tensor, ...]]:
    """Return the official block with random parameters, and inputs."""
    torch.manual_seed(0)
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer
    block = EvoformerBlock(config, C_M, C_Z, zero_init=False).eval()
    inputs = (
        torch.randn(ROWS, RESIDUES, C_M),
        torch.randn(RESIDUES, RESIDUES, C_Z),
        torch.ones(ROWS, RESIDUES),
        torch.ones(RESIDUES, RESIDUES),
    )
    return block, inputs


def passes(block: EvoformerBlock, inputs: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], None]]:
    """Return the measured passes by name."""
    msa, pair, *masks = inputs
    own = msa.clone(), pair.clone()

    def forward() -> None:
        with torch.no_grad():
            block(msa, pair, *masks)

    def forward_backward() -> None:
        leaves = msa.detach().requires_grad_(), pair.detach().requires_grad_()
        outputs = block(*leaves, *masks)
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        block.zero_grad(set_to_none=True)

    def forward_in_a_fold() -> None:
        for mine, given in zip(own, inputs, strict=False):
            mine.copy_(given)
        set_policy(block, FOLDING_POLICY)
        with torch.inference_mode(), exact_products(torch.device("cpu")):
            block(*own, *masks)
        set_policy(block, ExecutionPolicy())

    def reduced(products: Products) -> Callable[[], None]:
        def forward_reduced() -> None:
            with reduced_products(products):
                forward_in_a_fold()

        return forward_reduced

    return {
        "forward": forward,
        "forward_in_a_fold": forward_in_a_fold,
        "forward_backward": forward_backward,
        "forward_bf16_products": reduced("bf16"),
        "forward_int8": reduced("int8"),
    }


def seconds(function: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def speed(rounds: int) -> dict[str, Any]:
    """Measure ratios to the matrix-product rate, in turns."""
    steps = passes(*setup())
    work = {name: (3 if "backward" in name else 1) * forward_flops() for name in steps}
    for step in steps.values():
        step()
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    rates: list[float] = []
    for _ in range(rounds):
        for name, step in steps.items():
            before = product_rate()
            achieved = work[name] / seconds(step)
            rate = (before + product_rate()) / 2
            rates.append(rate)
            ratios[name].append(achieved / rate)
    return {
        "matrix_product_gflops": statistics.median(rates) / 1e9,
        **{name: statistics.median(found) for name, found in ratios.items()},
    }


def peak_memory(name: str) -> float:
    """Measure a pass' peak resident memory above the inputs, in U, in a fresh process."""
    block, inputs = setup()
    # A small pass first loads the libraries' code and thread pools, which are not part of the block's memory.
    small = (torch.randn(4, 8, C_M), torch.randn(8, 8, C_Z), torch.ones(4, 8), torch.ones(8, 8))
    passes(block, small)[name]()
    before = process_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    passes(block, inputs)[name]()
    return (process_memory("VmHWM") - before) / (RESIDUES**2 * C_Z * 4)


def main() -> None:
    """Measure the block, print ratios, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each pass (default 3)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--memory-of", choices=list(TARGETS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(peak_memory(options.memory_of))
        return
    found = speed(options.rounds)
    for name in ("forward", "forward_backward"):
        command = [sys.executable, __file__, "--memory-of", name]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        found[f"{name}_peak_u"] = float(run.stdout)
    print(
        f"one block, MSA {ROWS} x {RESIDUES}, c_m {C_M}, c_z {C_Z}, float32: {forward_flops() / 1e9:.0f} GFLOP"
    )
    print(
        f"matrix product: {found['matrix_product_gflops']:.0f} GFLOP/s on {torch.get_num_threads()} threads"
    )
    for name, target in TARGETS.items():
        verdict = "met" if found[name] >= target else "NOT met"
        print(f"{name:<21} {found[name]:.2f} of the matrix-product rate (target {target:.2f}, {verdict})")
    verdict = "met" if found["forward_peak_u"] < MEMORY_TARGET else "NOT met"
    print(
        f"forward peak          {found['forward_peak_u']:.2f} U above the inputs "
        f"(target {MEMORY_TARGET:.0f}, {verdict})"
    )
    print(f"forward_backward      {found['forward_backward_peak_u']:.2f} U above the inputs")
    if options.json:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        options.json.write_text(
            json.dumps(found | machine | {"threads": torch.get_num_threads()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
