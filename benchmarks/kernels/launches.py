"""Launches of every operator at lengths of each specialisation class, recorded on a CPU and compiled for a GPU.

Triton compiles a kernel again for arguments that are multiples of 16, and proteins have any length. The launches of a
GPU are recorded on the CPU, forward and backward, from one Evoformer block of ``model_1``, the MSA's part of a block of
the extra MSA stack, and the operators that they don't use. Results are not computed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fastfold.kernels.common.backend
from benchmarks.kernels.recording import as_chip, launches_replaced
from fastfold import kernels
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock

LENGTHS = {"16": 48, "8": 40, "odd": 37}
"""Residues of each class: a multiple of 16, of 8 only, and an odd number."""

DEPTHS = {"16": 32, "8": 24, "odd": 21}
"""Sequences of each class."""


@dataclass(frozen=True)
class Launch:
    """Launch of a kernel.

    Attributes:
        step: Layer of the block, or operator, that launches it.
        kernel: The ``triton.jit`` function.
        arguments: Positional arguments.
        options: Keyword arguments.
        number: Position among the launches of this kernel in this step.
    """

    step: str
    kernel: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    number: int

    @property
    def name(self) -> str:
        """Name of the kernel without its ending."""
        return str(self.kernel.__name__).removesuffix("_kernel")

    def compile(self) -> Any:
        """Compile for the GPU that :func:`~benchmarks.kernels.compilation.no_gpu` simulates."""
        return self.kernel.run(*self.arguments, grid=(1,), warmup=True, **self.options)


def recorded(
    dtype: torch.dtype, chip: str, residues: int, depth: int, steps: Iterable[str] = ()
) -> list[Launch]:
    """Record the launches on a class of chips.

    Args:
        dtype: Dtype of all tensors.
        chip: Key of :data:`~benchmarks.kernels.variants.CHIPS`.
        residues: N.
        depth: Sequences of the alignment.
        steps: Names of the steps to record; all if empty.
    """
    found: list[Launch] = []
    chosen = set(steps)
    with cpu_passes_for_gpu(), as_chip(chip):
        for name, run in steps_of(dtype, residues, depth):
            if chosen and name not in chosen:
                continue
            counts: dict[str, Iterator[int]] = {}

            def keep(kernel: Any, grid: Any, name: str = name, counts: Any = counts) -> Callable[..., None]:
                def launch(*arguments: Any, **options: Any) -> None:
                    number = next(counts.setdefault(kernel.__name__, itertools.count(1)))
                    found.append(Launch(name, kernel, arguments, options, number))

                return launch

            with launches_replaced(keep):
                run()
    return found


@contextlib.contextmanager
def cpu_passes_for_gpu() -> Iterator[None]:
    """Let operators take Triton's path on any device."""
    backend = fastfold.kernels.common.backend
    with (
        mock.patch.dict("os.environ", {backend.VARIABLE: "triton"}),
        mock.patch.object(backend, "_no_triton", return_value=None),
    ):
        yield


def steps_of(dtype: torch.dtype, residues: int, depth: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield layers and operators by name, with a function that runs both passes; arguments as of :func:`recorded`."""

    def leaf(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype).requires_grad_()

    yield from _layers(dtype, residues, depth, global_column=False)
    extra = _layers(dtype, residues, depth, global_column=True)
    yield from ((f"extra_{name}", run) for name, run in extra if name.startswith("msa_"))
    c = 128
    z, mask = leaf(residues, residues, c), torch.ones(residues, residues, dtype=dtype)
    norm, product = (leaf(c), leaf(c)), leaf(c, residues, residues)
    factors = kernels.FactorParams(*norm, leaf(2 * c, c), leaf(2 * c), leaf(2 * c, c), leaf(2 * c))
    update = kernels.UpdateParams(*norm, leaf(c), leaf(c), leaf(c, c), leaf(c), leaf(c, c), leaf(c))
    residual = {"x": z, "residual": leaf(residues, residues, c), "bias": leaf(c)}
    yield "residual_update", lambda: _backward(kernels.residual_update(**residual), residual.values())
    yield ("triangle_factors", lambda: _backward(kernels.triangle_factors(z, mask, factors), (z, *factors)))
    yield (
        "triangle_update",
        lambda: _backward(kernels.triangle_update(product, z, update), (product, z, *update)),
    )


def _layers(
    dtype: torch.dtype, residues: int, depth: int, *, global_column: bool
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the layers of a block, each with its own inputs."""
    c_m, c_z = (64 if global_column else 256), 128
    config = model_config("model_1").model.embeddings_and_evoformer
    block = EvoformerBlock(config.evoformer, c_m, c_z, zero_init=False, global_column=global_column).to(dtype)
    msa = torch.ones(depth, residues, c_m, dtype=dtype).requires_grad_()
    pair = torch.ones(residues, residues, c_z, dtype=dtype).requires_grad_()
    msa_mask = torch.ones(depth, residues, dtype=dtype)
    pair_mask = torch.ones(residues, residues, dtype=dtype)
    inputs = {
        "msa_row_attention": (msa, pair, msa_mask),
        "msa_column_attention": (msa, msa_mask),
        "msa_transition": (msa,),
        "outer_product_mean": (msa, pair, msa_mask),
        "pair_transition": (pair,),
    }

    def runs(layer: nn.Module, given: tuple[Tensor, ...]) -> Callable[[], None]:
        return lambda: _backward(layer(*given), (*given, *layer.parameters()))

    for name, layer in block.named_children():
        yield name, runs(layer, inputs.get(name, (pair, pair_mask)))


def _backward(out: Any, inputs: Iterable[Tensor]) -> None:
    outs = [out] if isinstance(out, Tensor) else list(out)
    torch.autograd.grad(outs, [x for x in inputs if x.requires_grad], [torch.ones_like(x) for x in outs])
