"""What the tests of Triton kernels share: where they run, and the comparison with a definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastfold.kernels.cpu import products
from fastfold.kernels.cpu.products import multiplies_bfloat16
from tests.helpers.exact_gradients import exact_gradients

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A GPU, or the CPU under Triton's interpreter (see conftest.py)."""

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 2e-3}
"""Relative error of outputs and gradients that a kernel may have, by dtype of its inputs."""

DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCES]
BACKENDS = ["torch", "triton"]


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    difference = (found.detach().cpu().double() - exact.detach().cpu().double()).norm()
    return float(difference / exact.detach().double().norm().cpu().clamp(min=1e-30))


def output_and_gradients(
    function: Callable[..., Tensor], inputs: dict[str, Any], constants: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Output of a function and the gradients of a fixed weighted sum of it, by name of the input.

    Args:
        function: Called with ``inputs`` as keyword arguments.
        inputs: Tensors of floating dtype receive gradients; their strides are kept.
        constants: Names of tensors that receive none.
    """
    leaves = {
        key: x.detach().requires_grad_()
        for key, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point() and key not in constants
    }
    out = function(**(inputs | leaves))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with exact_gradients():
        out.backward(weight.to(torch.bfloat16).to(out))  # the same numbers in every dtype
    return {"output": out.detach()} | {k: x.grad for k, x in leaves.items() if x.grad is not None}


def check_against_definition(
    function: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    inputs: dict[str, Any],
    dtype: torch.dtype,
    constants: Iterable[str] = (),
) -> None:
    """Assert that output and every gradient are within the tolerance of the definition in float64.

    Args:
        function: Operator under test.
        definition: Its specification.
        inputs: In float64 on the CPU; both get them rounded to ``dtype``.
        dtype: Dtype of the operator's inputs; bfloat16 on a CPU also as on one without units for it.
        constants: Names of tensors that receive no gradient.
    """
    rounded = {k: x.to(DEVICE, dtype) if isinstance(x, Tensor) else x for k, x in inputs.items()}
    exact = output_and_gradients(
        definition, {k: x.double() if isinstance(x, Tensor) else x for k, x in rounded.items()}, constants
    )
    _check_against(exact, output_and_gradients(function, rounded, constants), dtype)
    if dtype == torch.bfloat16 and DEVICE.type == "cpu" and multiplies_bfloat16():
        with without_bfloat16_units():
            _check_against(exact, output_and_gradients(function, rounded, constants), dtype)


def _check_against(exact: dict[str, Tensor], computed: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert computed.keys() == exact.keys()
    scale = max(float(x.norm()) for x in exact.values())
    for key, value in exact.items():
        x = computed[key]
        assert torch.isfinite(x).all(), key
        # Gradients that cancel to nothing are measured against the largest one.
        cancelled = float(value.norm()) < 1e-9 * scale
        error = float(x.double().norm()) / scale if cancelled else relative_error(x, value)
        assert error < TOLERANCES[dtype], f"{key}: {error:.2e}"


@contextmanager
def without_bfloat16_units() -> Iterator[None]:
    """The processor is taken for one that cannot multiply bfloat16, as most in laptops."""
    with mock.patch.object(products, "BFLOAT16_UNITS", ()):
        multiplies_bfloat16.cache_clear()
        yield
    multiplies_bfloat16.cache_clear()


def far_apart(values: Tensor, path: Path) -> Tensor:
    """``values [n, c]`` in bfloat16 as rows that lie so far apart that the last is beyond 2^31 elements.

    The memory is a file with holes of which only the rows take up space, so it works without a GPU and without
    gigabytes. Values on a GPU get gigabytes there. Offsets that wrap around in 32 bits fall into the file too: a
    kernel that computes them reads wrong numbers, and does not crash.

    Args:
        values: What the rows hold.
        path: Of the file, which is to be removed by the caller if it is there.
    """
    rows, channels = values.shape
    stride = -(-(2**31 + 64) // (rows - 1))
    size = 2**31 + (rows - 1) * stride + channels
    if values.is_cuda:
        memory = torch.zeros(size, dtype=torch.bfloat16, device=values.device)
    else:
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    return memory.as_strided((rows, channels), (stride, 1), storage_offset=2**31).copy_(values)
