"""Gradients of an Evoformer block in bfloat16 against those in float64, by layer.

Usage: python benchmarks/gradient_cosines.py [--sequences 16] [--residues 24]

A block of official width with random parameters, the same in both dtypes after rounding to bfloat16. Each row has the
smallest cosine of a layer's parameters, and of MSA and pair, and the largest difference of their norms. On a processor
without units for bfloat16 the backward pass computes in float32.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import cosine_similarity  # noqa: E402

from fastfold.evoformer.config import model_config  # noqa: E402
from fastfold.evoformer.evoformer import EvoformerBlock  # noqa: E402
from fastfold.evoformer.precision import parameters_to  # noqa: E402
from fastfold.kernels.cpu.products import multiplies_bfloat16  # noqa: E402
from fastfold.utils.machine import processor_name  # noqa: E402

C_M, C_Z = 256, 128


def gradients(
    block: EvoformerBlock, inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Return gradients of a weighted sum of the outputs by name, in float64."""
    msa, pair, *masks = inputs
    leaves = {"MSA": msa.clone().requires_grad_(), "pair": pair.clone().requires_grad_()}
    outputs = block(*leaves.values(), *masks)
    torch.autograd.backward(outputs, [w.to(x) for w, x in zip(weights, outputs, strict=True)])
    named = {**leaves, **dict(block.named_parameters())}
    return {name: x.grad.double() for name, x in named.items() if x.grad is not None}


def main() -> None:
    """Print a table of all layers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--residues", type=int, default=24)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = model_config("model_3").model.embeddings_and_evoformer.evoformer
    block = EvoformerBlock(config, C_M, C_Z, zero_init=False).eval()
    s, n = options.sequences, options.residues
    msa, pair = torch.randn(s, n, C_M).bfloat16(), torch.randn(n, n, C_Z).bfloat16()
    weights = torch.randn(s, n, C_M).bfloat16(), torch.randn(n, n, C_Z).bfloat16()
    masks = torch.ones(s, n), torch.ones(n, n)
    parameters_to(block, torch.bfloat16)
    reduced = gradients(block, (msa, pair, *(x.bfloat16() for x in masks)), weights)
    block.zero_grad(set_to_none=True)
    block.to(torch.float64)
    exact = gradients(block, (msa.double(), pair.double(), *(x.double() for x in masks)), weights)
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    largest = max(float(x.norm()) for x in exact.values())
    for name, x in exact.items():
        if float(x.norm()) < 1e-9 * largest:  # cancels: a shift of all scores does not change a softmax
            continue
        cosine = float(cosine_similarity(reduced[name].flatten(), x.flatten(), 0))
        rows[name.split(".")[0]].append((cosine, abs(float(reduced[name].norm() / x.norm()) - 1)))
    print("| gradients of | smallest cosine | largest difference of norms |\n|---|---|---|")
    for layer, values in rows.items():
        print(f"| {layer} | {min(c for c, _ in values):.6f} | {max(d for _, d in values):.1e} |")
    units = "with" if multiplies_bfloat16() else "without"
    print(f"\n{s} x {n}, {processor_name()} {units} units for bfloat16, torch {torch.__version__}")


if __name__ == "__main__":
    main()
