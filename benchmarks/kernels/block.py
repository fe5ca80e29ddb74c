"""Whole Evoformer block, forward and backward: with the kernels, and with eager PyTorch in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.cases import C_M, C_Z
from benchmarks.kernels.measuring import Inputs, Meter, Timing
from benchmarks.kernels.plain_operators import plain_network
from fastfold.evoformer.evoformer import EvoformerBlock

BLOCK = "evoformer_block"


class _Node(dict[str, Any]):
    """Dict whose entries are also attributes."""

    __getattr__ = dict.__getitem__


def block_config() -> Any:
    """Return a block's part of the official ``model_1``, without the package of configurations.

    GPUs may be on machines with few packages.
    """
    heads = {"gating": True, "num_head": 8}
    pair = {"gating": True, "num_head": 4, "dropout_rate": 0.25}
    triangle = {"dropout_rate": 0.25, "num_intermediate_channel": 128}
    steps = {
        "msa_row_attention_with_pair_bias": {"dropout_rate": 0.15, **heads},
        "msa_column_attention": {"dropout_rate": 0.0, **heads},
        "msa_transition": {"num_intermediate_factor": 4},
        "outer_product_mean": {"first": False, "num_outer_channel": 32},
        "triangle_multiplication_outgoing": {"equation": "ikc,jkc->ijc", **triangle},
        "triangle_multiplication_incoming": {"equation": "kjc,kic->ijc", **triangle},
        "triangle_attention_starting_node": {"orientation": "per_row", **pair},
        "triangle_attention_ending_node": {"orientation": "per_column", **pair},
        "pair_transition": {"num_intermediate_factor": 4},
    }
    return _Node({name: _Node(step) for name, step in steps.items()})


@dataclass(frozen=True)
class BlockRun:
    """Block in training mode on one shape.

    Attributes:
        rows: Rows of the alignment.
        residues: Columns of the alignment.
        implementation: ``fastfold``, ``eager`` or ``compile`` (of the eager one).
    """

    rows: int
    residues: int
    implementation: str

    def times(self, meter: Meter, dtype: torch.dtype) -> Iterator[tuple[str, Timing]]:
        """Yield the cost of the forward pass (without recording gradients), and of both passes together."""
        torch.manual_seed(0)
        block = EvoformerBlock(block_config(), C_M, C_Z, zero_init=False).to(meter.device, dtype)
        run = block
        if self.implementation == "compile":
            run = torch.compile(block, backend="inductor" if meter.cuda else "eager")
        s, n = self.rows, self.residues
        shapes = {"msa": (s, n, C_M), "pair": (n, n, C_Z)}
        inputs: Inputs = {
            k: torch.randn(*v, device=meter.device, dtype=dtype, requires_grad=True)
            for k, v in shapes.items()
        }
        inputs["msa_mask"] = torch.ones(s, n, device=meter.device, dtype=dtype)
        inputs["pair_mask"] = torch.ones(n, n, device=meter.device, dtype=dtype)

        def forward(x: Inputs) -> None:
            with torch.no_grad():
                run(**x)

        def both(x: Inputs) -> None:
            outputs = run(**x)
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            block.zero_grad(set_to_none=True)
            x["msa"].grad = x["pair"].grad = None

        passes: dict[str, Callable[[Inputs], None]] = {"forward": forward, "forward+backward": both}
        used: AbstractContextManager[None] = (
            nullcontext() if self.implementation == "fastfold" else plain_network()
        )
        with used:
            for name, step in passes.items():
                yield name, meter.time(step, meter.sets(inputs))
