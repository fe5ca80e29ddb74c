"""Evoformer blocks in float32 and in the precision that ``auto`` chooses on this processor.

Usage: python benchmarks/precision_choice.py [--sizes 1x50 ...] [--rounds 5] [--threads 1] [--table FILE]

A block of the widths of ``mini`` and of AlphaFold's networks folds random inputs with each number of sequences and
residues, in turns; the best processor time of all rounds counts. ``auto`` takes products in fewer bits for calls that
are large enough for a measurement on this processor (``fastfold/evoformer/quantization/least_work.py``), and float32
for the others, where both columns are the same program. Without units for fewer bits, ``auto`` is float32, and the
tables show the time of ``bf16-products`` and ``int8`` if they were used all the same.
"""

from __future__ import annotations

import argparse
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.evoformer import EvoformerBlock  # noqa: E402
from fastfold.evoformer.execution import set_policy  # noqa: E402
from fastfold.evoformer.precision import choose_precision  # noqa: E402
from fastfold.evoformer.quantization.least_work import is_faster, least_work  # noqa: E402
from fastfold.inference.planning.planner import FOLDING_POLICY  # noqa: E402
from fastfold.kernels.cpu.linear import Products, reduced_products  # noqa: E402
from fastfold.kernels.cpu.products import exact_products  # noqa: E402
from fastfold.utils.machine import processor_name  # noqa: E402

NETWORKS = {"mini": "mini", "official": "model_3"}
SIZES = ("1x50", "16x50", "64x50", "1x100", "64x100", "1x200", "64x64", "128x256", "512x384")
PRODUCTS: dict[str, Products] = {"bf16-products": "bf16", "int8": "int8"}


def seconds(block: EvoformerBlock, inputs: tuple[Tensor, ...], products: Products | None) -> float:
    """Return the processor time of a pass."""
    msa, pair, *masks = inputs
    own = msa.clone(), pair.clone()
    context: AbstractContextManager[None] = nullcontext() if products is None else reduced_products(products)
    with context:
        start = time.process_time()
        block(*own, *masks)
        return time.process_time() - start


def row(network: str, size: str, products: Products, rounds: int) -> str:
    """Measure a size; return a row of the table."""
    config = model_config(NETWORKS[network]).model.embeddings_and_evoformer
    c_m, c_z = config.msa_channel, config.pair_channel
    torch.manual_seed(0)
    block = EvoformerBlock(config.evoformer, c_m, c_z, zero_init=False).eval()
    set_policy(block, FOLDING_POLICY)
    sequences, residues = map(int, size.split("x"))
    msa, pair = torch.randn(sequences, residues, c_m), torch.randn(residues, residues, c_z)
    inputs = msa, pair, torch.ones(sequences, residues), torch.ones(residues, residues)
    with torch.inference_mode(), exact_products(torch.device("cpu")):
        chosen = products if is_faster((msa, pair), config, products) else None
        seconds(block, inputs, products)
        times = [[seconds(block, inputs, kind) for kind in (None, products)] for _ in range(rounds)]
    exact, reduced = (1e3 * min(column) for column in zip(*times, strict=True))
    auto = exact if chosen is None else reduced
    name = "float32" if chosen is None else "fewer bits"
    return f"| {network} | {sequences} x {residues} | {exact:,.1f} | {reduced:,.1f} | {name} | {exact / auto:.2f} |"


def main() -> None:
    """Print a table of all sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SxN")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", type=Path, help="append the table to a file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen, reason = choose_precision("auto", torch.device("cpu"))
    print(f"auto is {chosen}: {reason}\n")
    lines: list[str] = []

    def add(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    for precision in [chosen] if chosen in PRODUCTS else PRODUCTS:
        add(f"| network | sequences x residues | float32, ms | {precision}, ms | `auto` | times as fast |")
        add("|---|---|---|---|---|---|")
        for network in NETWORKS:
            for size in options.sizes:
                add(row(network, size, PRODUCTS[precision], options.rounds))
        add("")
    for network, name in NETWORKS.items() if chosen in PRODUCTS else ():
        work = least_work(model_config(name).model.embeddings_and_evoformer, PRODUCTS[chosen])
        add(f"Least work of {network}: {work / 1e6:.1f} million.")
    print(f"{processor_name()}, {options.threads} threads, torch {torch.__version__}")
    if options.table is not None:
        with options.table.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
