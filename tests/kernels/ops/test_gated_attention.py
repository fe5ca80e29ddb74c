"""The whole residual branch of gated attention on both backends equals its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.errors import InputError
from fastfold.kernels import gated_attention, reference
from tests.helpers.kernel_checks import (
    BACKENDS,
    DEVICE,
    DTYPES,
    TOLERANCES,
    check_against_definition,
    output_and_gradients,
    relative_error,
)

CONSTANTS = frozenset({"mask", "dropout"})


def operands(
    rows: int, length: int, batch: tuple[int, ...] = (), leave_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Random arguments in float64: 24 channels, 2 heads of 16; the first row has no keys at all."""
    generator = torch.Generator().manual_seed(rows + 100 * length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = (torch.rand(*batch, rows, length, generator=generator) > 0.3).double()
    mask[..., 1:, 0] = 1
    mask[..., 0, :] = 0
    made = {
        "x": normal(*batch, rows, length, 24),
        "bias": normal(*batch, 2, length, length),
        "mask": mask,
        "norm_weight": 1 + 0.2 * normal(24),
        "norm_bias": 0.2 * normal(24),
        **{f"{part}_weight": normal(32, 24) / 5 for part in ("query", "key", "value", "gate")},
        "gate_bias": normal(32),
        "output_weight": normal(24, 32) / 5,
        "output_bias": normal(24),
    }
    return {name: None if name in leave_out else x for name, x in made.items()}


def on_device(inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {name: x if x is None else x.to(DEVICE, dtype) for name, x in inputs.items()}


def check(backend: str, inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    def run(**arguments: Tensor) -> Tensor:
        return gated_attention(**arguments, heads=2, backend=backend)

    def definition(**arguments: Tensor) -> Tensor:
        return reference.gated_attention(**arguments, heads=2)

    check_against_definition(run, definition, inputs, dtype, CONSTANTS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(2, 1), (3, 17), (2, 65)])
def test_output_and_gradients_for_every_dtype(
    backend: str, dtype: torch.dtype, rows: int, length: int
) -> None:
    check(backend, operands(rows, length), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "leave_out", [("bias",), ("mask",), ("gate_weight", "gate_bias")], ids=lambda names: names[0]
)
def test_bias_mask_and_gate_are_optional(backend: str, leave_out: tuple[str, ...]) -> None:
    check(backend, operands(2, 9, leave_out=leave_out))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_leading_axes(backend: str) -> None:
    check(backend, operands(2, 5, batch=(2, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_rows_make_the_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last one shorter, add up to the gradients of bias and parameters."""
    name = {"torch": "eager", "triton": "triton_launch"}[backend]
    module = pytest.importorskip(f"fastfold.kernels.ops.gated_attention.{name}")
    monkeypatch.setattr(module, "row_step", lambda x: 2)
    check(backend, operands(5, 7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_are_attended_to_in_transposed_views(backend: str) -> None:
    """As around the ending node: x, mask and bias transposed, and the result laid out like x."""
    inputs = on_device(operands(6, 6))
    views = dict(inputs)
    views["x"] = inputs["x"].transpose(0, 1).contiguous().transpose(0, 1)
    views["bias"], views["mask"] = (inputs[name].mT.contiguous().mT for name in ("bias", "mask"))

    def run(**arguments: Tensor) -> Tensor:
        return gated_attention(**arguments, heads=2, backend=backend)

    plain, found = (output_and_gradients(run, x, CONSTANTS) for x in (inputs, views))
    assert found["output"].stride() == views["x"].stride()
    for name, value in plain.items():
        assert relative_error(found[name], value) < 1e-6, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [True, False], ids=["x", "another"])
def test_residual_and_dropout(backend: str, own: bool) -> None:
    inputs = operands(2, 7)
    inputs["dropout"] = (torch.arange(24) % 3 > 0).double() * 1.5
    if not own:
        inputs["residual"] = inputs["x"].flip(0).contiguous()

    def run(**arguments: Tensor) -> Tensor:
        return gated_attention(**({"residual": arguments["x"]} | arguments), heads=2, backend=backend)

    def definition(dropout: Tensor, residual: Tensor | None = None, **arguments: Tensor) -> Tensor:
        update = reference.gated_attention(**arguments, heads=2)
        return (arguments["x"] if residual is None else residual) + dropout * update

    check_against_definition(run, definition, inputs, torch.float32, CONSTANTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_into_its_input(backend: str) -> None:
    inputs = on_device(operands(3, 7))
    x = inputs["x"]
    exact = x.double() + reference.gated_attention(**operands(3, 7), heads=2).to(DEVICE)
    with torch.no_grad():
        result = gated_attention(**inputs, heads=2, residual=x, out=x, backend=backend)
    assert result.data_ptr() == x.data_ptr()
    assert relative_error(x, exact) < TOLERANCES[torch.float32]
    inputs["query_weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradients"):
        gated_attention(**inputs, heads=2, out=x, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bias", "mask", "gate_weight"])
def test_leaving_out_an_argument_shows(backend: str, name: str) -> None:
    inputs = operands(3, 17)
    left_out = {name, "gate_bias"} if name == "gate_weight" else {name}
    changed = {k: None if k in left_out else x for k, x in inputs.items()}
    found = gated_attention(**on_device(changed), heads=2, backend=backend)
    exact = reference.gated_attention(**inputs, heads=2)
    assert relative_error(found - inputs["output_bias"].to(found), exact - inputs["output_bias"]) > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_check_of_pytorch(backend: str) -> None:
    inputs = on_device(operands(2, 5))
    leaves = {name: x.requires_grad_(name not in CONSTANTS) for name, x in inputs.items()}
    x, bias, mask, *parameters = leaves.values()
    torch.library.opcheck(
        torch.ops.fastfold.gated_attention.default,
        (x, bias, mask, None, None, *parameters),
        {"heads": 2, "add_x": True, "backend": backend},
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend: str) -> None:
    inputs = on_device(operands(2, 5))

    def run(**arguments: Tensor) -> Tensor:
        return gated_attention(**arguments, heads=2, residual=arguments["x"], backend=backend).sin()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    plain = output_and_gradients(run, inputs, CONSTANTS)
    for name, value in output_and_gradients(compiled, inputs, CONSTANTS).items():
        torch.testing.assert_close(value, plain[name], msg=name)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_shapes_that_do_not_belong_together_are_refused(name: str) -> None:
    inputs = operands(2, 5)
    inputs[name] = inputs[name][..., :-1]
    with pytest.raises(InputError, match=f"{name} is"):
        gated_attention(**inputs, heads=2)
