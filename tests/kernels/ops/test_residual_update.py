"""The end of a residual branch on both backends equals its definition, with anything left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.errors import InputError
from fastfold.kernels import reference, residual_update
from fastfold.kernels.common.backend import interpreted
from tests.helpers.kernel_checks import (
    BACKENDS,
    DEVICE,
    DTYPES,
    TOLERANCES,
    check_against_definition,
    far_apart,
    output_and_gradients,
    relative_error,
)

CONSTANTS = frozenset({"dropout"})


def operands(rows: int, length: int, channels: int = 24, shared: str = "rows") -> dict[str, Tensor]:
    """Random arguments in float64; the dropout mask is shared by rows or by columns."""
    generator = torch.Generator().manual_seed(rows + 100 * length + channels)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (rows, length, channels)
    mask = (1, length, channels) if shared == "rows" else (rows, 1, channels)
    made = {name: normal(*shape) for name in ("x", "residual", "gate")} | {"bias": normal(channels)}
    return made | {"dropout": (normal(*mask) > -1).double() / 0.85}


def check(backend: str, inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    def run(**arguments: Tensor) -> Tensor:
        return residual_update(**arguments, backend=backend)

    check_against_definition(run, reference.residual_update, inputs, dtype, CONSTANTS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "length", "channels"), [(1, 1, 1), (3, 17, 24), (2, 129, 128), (2, 3, 1000)]
)
def test_output_and_gradients_for_every_dtype(
    backend: str, dtype: torch.dtype, rows: int, length: int, channels: int
) -> None:
    check(backend, operands(rows, length, channels), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("leave_out", ["residual", "gate", "bias", "dropout"])
def test_everything_but_x_is_optional(backend: str, leave_out: str) -> None:
    inputs = operands(3, 9)
    del inputs[leave_out]
    check(backend, inputs)
    check(backend, {"x": inputs["x"]})


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_shared_by_columns_too(backend: str) -> None:
    check(backend, operands(5, 6, shared="columns"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", ["x", "residual", "gate"])
def test_it_writes_into_what_it_reads(backend: str, target: str) -> None:
    """Transposed views, as around the ending node of triangle attention."""
    inputs = operands(6, 7)
    exact = reference.residual_update(**inputs).transpose(0, 1)
    views = {
        k: x.to(DEVICE, torch.float32) if k == "bias" else x.to(DEVICE, torch.float32).transpose(0, 1)
        for k, x in inputs.items()
    }
    out = views[target]
    assert residual_update(**views, out=out, backend=backend) is out
    assert relative_error(out, exact) < TOLERANCES[torch.float32]
    with pytest.raises(RuntimeError, match="no gradients"):
        residual_update(views["x"].requires_grad_(), out=views["residual"], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_axes_that_no_kernel_walks_over_are_written_too(backend: str) -> None:
    """Four leading axes in an order that lets none of them merge."""
    x = torch.randn(2, 3, 2, 3, 8, device=DEVICE)
    memory = torch.zeros(3, 2, 3, 2, 8, device=DEVICE)
    out = memory.permute(3, 2, 1, 0, 4)
    bias = torch.randn(8, device=DEVICE)
    residual_update(x, x, bias=bias, out=out, backend=backend)
    torch.testing.assert_close(out, 2 * x + bias)


@pytest.mark.skipif(not interpreted(), reason="a GPU cannot read a file with holes")
@pytest.mark.parametrize("rows", [2, 33])
def test_it_reaches_rows_beyond_two_to_the_31(rows: int, tmp_path: Path) -> None:
    values = torch.randn(rows, 16).bfloat16()
    path = tmp_path / "memory"
    x = far_apart(values, path)
    try:
        bias = torch.randn(16).bfloat16()
        exact = reference.residual_update(values.double(), values.double(), bias.double())
        gate = torch.zeros(rows, 16).bfloat16()
        assert relative_error(residual_update(x, x, bias=bias, backend="triton"), exact) < 5e-3
        found = torch.ops.fastfold.residual_update_backward(x, x, bias, gate, None, True, "triton")
        wanted = torch.ops.fastfold.residual_update_backward(values, values, bias, gate, None, True, "torch")
        for name, one, other in zip(("x", "bias", "gate"), found, wanted, strict=True):
            assert relative_error(one, other) < 5e-3, name
        residual_update(values, bias=bias, out=x, backend="triton")
        assert relative_error(x, values.double() + bias.double()) < 5e-3
    finally:
        path.unlink()


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_check_of_pytorch(backend: str) -> None:
    inputs = {k: x.to(DEVICE, torch.float32) for k, x in operands(3, 5).items()}
    x, residual, gate, bias = (inputs[k].requires_grad_() for k in ("x", "residual", "gate", "bias"))
    operator = torch.ops.fastfold.residual_update.default
    how = {"backend": backend}
    torch.library.opcheck(operator, (x, residual, bias, gate, inputs["dropout"].expand_as(x)), how)
    torch.library.opcheck(operator, (x, None, None, None, None), how)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend: str) -> None:
    inputs = {k: x.to(DEVICE, torch.float32) for k, x in operands(3, 5).items()}

    def run(**arguments: Tensor) -> Tensor:
        return residual_update(**arguments, backend=backend).sin()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    plain = output_and_gradients(run, inputs, CONSTANTS)
    for name, value in output_and_gradients(compiled, inputs, CONSTANTS).items():
        torch.testing.assert_close(value, plain[name], msg=name)


@pytest.mark.parametrize("name", ["residual", "bias", "gate", "dropout"])
def test_shapes_that_do_not_belong_together_are_refused(name: str) -> None:
    inputs = operands(3, 5)
    inputs[name] = inputs[name][..., :-1]
    with pytest.raises(InputError, match=name):
        residual_update(**inputs)
