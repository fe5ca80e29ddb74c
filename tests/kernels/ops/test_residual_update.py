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
from fastfold.kernels.ops.residual_update.operands import UpdateOperands
from fastfold.kernels.ops.residual_update.triton_bwd import update_backward
from fastfold.kernels.ops.residual_update.triton_fwd import write_update
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
        found = torch.ops.fastfold.residual_update_backward(x, x, bias, gate, None, [True] * 3, "triton")
        wanted = torch.ops.fastfold.residual_update_backward(
            values, values, bias, gate, None, [True] * 3, "torch"
        )
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


def _branch(x: Tensor, residual: Tensor, bias: Tensor, gate: Tensor, dropout: Tensor) -> Tensor:
    return residual + dropout * (x + bias) / (1 + (-gate).exp())


def test_the_kernel_may_write_onto_any_operand() -> None:
    """In float32, of tensors whose axes are exchanged or cut out of larger ones."""
    made = operands(3, 7, 21)
    exact = _branch(**made)
    for place in ("x", "residual", "gate"):
        given = {name: x.float().to(DEVICE) for name, x in made.items()}
        given["dropout"] = given["dropout"].expand_as(given["x"])
        given["gate"] = torch.stack([given["gate"]] * 2, -2).flatten(-3, -2)[:, ::2]
        given["residual"] = given["residual"].transpose(0, 1).contiguous().transpose(0, 1)
        write_update(given[place], UpdateOperands(**given))
        assert relative_error(given[place], exact) < 1e-6


def test_a_target_that_cannot_be_walked_over_is_filled_all_the_same() -> None:
    """Five axes in another order than those of ``x``: the kernel fills a copy."""
    x = torch.arange(96.0, device=DEVICE).view(2, 2, 2, 2, 2, 3)
    out = torch.zeros_like(x).permute(4, 3, 2, 1, 0, 5)
    write_update(out, UpdateOperands(x, x, None, None, None))
    assert torch.equal(out, 2 * x)


def test_gradients_of_the_kernel_are_those_of_the_definition() -> None:
    made = operands(3, 7, 21)
    leaves = [made[name].requires_grad_() for name in ("x", "bias", "gate")]
    grad = torch.randn(3, 7, 21, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = torch.autograd.grad(_branch(**made), leaves, grad)
    x, bias, gate, dropout = (made[n].detach().float().to(DEVICE) for n in ("x", "bias", "gate", "dropout"))
    rest = (x, bias, gate, dropout.expand_as(x))
    found = update_backward(grad.float().to(DEVICE), *rest, need_bias=True)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine is not None
        assert mine.is_contiguous()
        assert relative_error(mine, theirs) < 1e-6
    _, none, _ = update_backward(grad.float().to(DEVICE), *rest, need_bias=False)
    assert none is None
    empty, nothing, _ = update_backward(x[:0], x[:0], bias, None, None, need_bias=True)
    assert empty is not None
    assert nothing is not None
    assert (tuple(empty.shape), nothing.tolist()) == ((0, 7, 21), [0.0] * 21)
