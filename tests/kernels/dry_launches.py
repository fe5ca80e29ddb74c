"""Run as a program: launches of every operator, bound and compiled as on a GPU, and not run.

Usage: python -m tests.kernels.dry_launches DTYPE ARCHITECTURE

One Evoformer block of ``model_1``, a block of the extra MSA stack, and the operators that they don't use, forward and
backward, on the CPU: whatever a launch on a GPU does up to the call of the driver happens here too. Numbers are
nobody's. Prints a JSON object for every kernel that was compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import fastfold.kernels.common.backend
from fastfold import kernels
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.kernels.aot import needs_of, no_gpu
from fastfold.kernels.common.backend import launches_replaced
from fastfold.kernels.common.kernel_variant import BLOCKS
from fastfold.kernels.common.tuning import as_chip

RESIDUES, ROWS = 32, 3


def _compiling(kernel: Any, grid: Any) -> Callable[..., None]:
    """In place of ``kernel[grid]``: the launch ends where the driver would be called."""

    def launch(*args: Any, **kwargs: Any) -> None:
        compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
        names = kernel.arg_names
        constants = {names[i]: value for (i, *_), value in compiled.src.constants.items()}
        how = compiled.metadata
        row = {
            "kernel": kernel.fn.__name__,
            "blocks": {n: x for n, x in constants.items() if n in BLOCKS},
            "how": [how.num_warps, how.num_stages],
            "spills": needs_of(compiled).spills,
        }
        print(json.dumps(row), flush=True)

    return launch


def _backward(out: Any, inputs: Mapping[str, Tensor], parameters: Any = ()) -> None:
    outs = [out] if isinstance(out, Tensor) else list(out)
    leaves = [x for x in (*inputs.values(), *parameters) if x.requires_grad]
    torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs])


def _block(dtype: torch.dtype, global_column: bool) -> None:
    c_m, c_z = (64 if global_column else 256), 128
    config = model_config("model_1").model.embeddings_and_evoformer
    block = EvoformerBlock(config.evoformer, c_m, c_z, zero_init=False, global_column=global_column).to(dtype)
    inputs = {"msa": torch.randn(ROWS, RESIDUES, c_m), "pair": torch.randn(RESIDUES, RESIDUES, c_z)}
    inputs = {k: x.to(dtype).requires_grad_() for k, x in inputs.items()}
    masks = {"msa_mask": torch.ones(ROWS, RESIDUES), "pair_mask": torch.ones(RESIDUES, RESIDUES)}
    masks = {k: x.to(dtype) for k, x in masks.items()}  # as in the network
    _backward(block(**inputs, **masks), inputs, block.parameters())


def _operators(dtype: torch.dtype) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    inputs = {"x": leaf(ROWS, RESIDUES, 128), "residual": leaf(ROWS, RESIDUES, 128), "bias": leaf(128)}
    _backward(kernels.residual_update(**inputs), inputs)
    c = 128
    norm = {"norm_weight": leaf(c), "norm_bias": leaf(c)}
    z, mask = leaf(ROWS, RESIDUES, c), torch.ones(ROWS, RESIDUES, dtype=dtype)
    inputs = norm | {"z": z, "proj_weight": leaf(2 * c, c), "proj_bias": leaf(2 * c)}
    inputs |= {"gate_weight": leaf(2 * c, c), "gate_bias": leaf(2 * c)}
    _backward(kernels.triangle_factors(mask=mask, **inputs), inputs)
    inputs = norm | {
        "z": z,
        "product": leaf(c, ROWS, RESIDUES),
        "out_weight": leaf(c, c),
        "out_bias": leaf(c),
    }
    inputs |= {"norm_out_weight": leaf(c), "norm_out_bias": leaf(c)}
    inputs |= {"out_gate_weight": leaf(c, c), "out_gate_bias": leaf(c)}
    _backward(kernels.triangle_update(**inputs), inputs)
    inputs = {"scores": leaf(ROWS, 4, RESIDUES, RESIDUES), "bias": leaf(4, RESIDUES, RESIDUES)}
    _backward(kernels.softmax(**inputs), inputs)


def main() -> None:
    """Launch everything in the dtype that the command line names."""
    dtype, architecture = getattr(torch, sys.argv[1]), int(sys.argv[2])
    # Tensors on the CPU pass for those of such a GPU.
    fastfold.kernels.common.backend._no_triton = lambda x: None
    with no_gpu(architecture), as_chip(f"sm_{architecture}"), launches_replaced(_compiling):
        _block(dtype, False)
        _block(dtype, True)
        _operators(dtype)


if __name__ == "__main__":
    main()
