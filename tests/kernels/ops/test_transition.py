"""The transition equals its definition on both backends, whatever the blocks that Triton's kernels work in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.recording import launches_replaced
from benchmarks.kernels.relu_signs import errors_of_signs
from fastfold.kernels import reference
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.cpu import block_threads
from fastfold.kernels.ops.transition import op, triton_bwd, triton_fwd
from tests.helpers import named_operators
from tests.helpers.forced_blocks import CHUNKS, WHOLE, force_blocks
from tests.helpers.kernel_checks import (
    BACKENDS,
    DEVICE,
    DTYPES,
    TOLERANCES,
    check_against_definition,
    far_apart,
    relative_error,
)

PARAMETERS = ["norm_weight", "norm_bias", "w1", "b1", "w2", "b2"]


def _inputs(*shape: int, hidden: int = 52) -> dict[str, Any]:
    torch.manual_seed(sum(shape))
    c = shape[-1]

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*size, dtype=torch.float64)

    return {
        "x": randn(*shape),
        "norm_weight": 1 + randn(c, scale=0.2),
        "norm_bias": randn(c, scale=0.2),
        "w1": randn(hidden, c, scale=c**-0.5),
        "b1": randn(hidden),
        "w2": randn(c, hidden, scale=hidden**-0.5),
        "b2": randn(c),
    }


def _on(backend: str, **rest: Any) -> Any:
    return lambda **inputs: named_operators.transition(**inputs, **rest, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17, 65])
def test_output_and_gradients(
    rows: int, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_blocks(monkeypatch, BM=64, BH=32, BK=WHOLE if dtype != torch.float32 else CHUNKS)
    check_against_definition(_on(backend), reference.transition, _inputs(rows, 20), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.parametrize("chunk", [CHUNKS, WHOLE])
def test_chunks_of_channels_do_not_matter(
    chunk: int, channels: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_blocks(monkeypatch, BM=32, BH=64, BK=chunk)
    inputs = _inputs(17, channels, hidden=4 * channels)
    check_against_definition(_on("triton"), reference.transition, inputs, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_units_on_the_wrong_side_of_the_relu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many units some are so close to zero that normalised rows in 16 bits would put them on the other side."""
    force_blocks(monkeypatch, BM=128, BH=64, BK=WHOLE)
    check_against_definition(_on("triton"), reference.transition, _inputs(1500, 16, hidden=64), dtype)


def test_only_a_split_product_decides_signs_well_enough() -> None:
    """Other precisions alone exceed the error that gradients in bfloat16 may have."""
    *others, (name, cost, wrong, error) = errors_of_signs(4096)
    assert (name[-7:], cost) == ("(split)", "2")
    assert wrong < 5e-6
    assert error < 0.5 * TOLERANCES[torch.bfloat16]
    assert all(error > TOLERANCES[torch.bfloat16] for *_, error in others)


@pytest.mark.parametrize(
    ("needed", "split"), [(("x", "w1"), [True, False]), (("w1",), [True]), (("x",), [True])]
)
def test_signs_replace_the_second_split_product(needed: tuple[str, ...], split: list[bool]) -> None:
    """The kernel that decides which units pass the ReLU tells the other, in a bit for each."""
    launches: list[dict[str, Any]] = []

    def launcher(kernel: object, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: launches.append(options)

    x, norm = torch.empty(9, 16, dtype=torch.bfloat16, device="meta"), torch.empty(16, device="meta")
    w1, b1 = x.new_empty(52, 16), x.new_empty(52)
    with launches_replaced(launcher):
        triton_bwd.backward(x, x, op.TransitionParams(norm, norm, w1, b1, w1.t(), x[0]), False, needed)
    assert [options["SPLIT"] for options in launches] == split
    assert [options["SIGNS"] for options in launches] == [len(split) == 2] * len(split)


def test_more_blocks_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that own several blocks add up what each of them gives."""
    force_blocks(monkeypatch, BM=16, BH=64, BK=WHOLE)
    monkeypatch.setattr("fastfold.kernels.ops.transition.triton_bwd.PROGRAMS", 3)
    monkeypatch.setattr("fastfold.kernels.common.normalized_rows.WEIGHT_PROGRAMS", 2)
    check_against_definition(_on("triton"), reference.transition, _inputs(120, 12), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_strides_and_residual(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=64, BH=64)
    inputs = _inputs(2, 3, 5, 12)
    inputs["x"] = inputs["x"].transpose(1, 2).transpose(2, 3).contiguous().transpose(2, 3)
    inputs["residual"] = torch.randn(2, 5, 3, 12, dtype=torch.float64)

    def definition(residual: Tensor, **rest: Tensor) -> Tensor:
        return residual + reference.transition(**rest)

    check_against_definition(_on(backend), definition, inputs, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_its_own_input_as_residual(dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=64, BH=64)

    def function(x: Tensor, **rest: Tensor) -> Tensor:
        return named_operators.transition(x, **rest, residual=x, backend=backend)

    def definition(x: Tensor, **rest: Tensor) -> Tensor:
        return x + reference.transition(x, **rest)

    check_against_definition(function, definition, _inputs(33, 12), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=16, BH=64)
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(5, 7, 12).items()}
    expected = inputs["x"] + reference.transition(**inputs)
    strided = torch.empty(7, 5, 12, device=DEVICE).transpose(0, 1).copy_(inputs["x"])
    for x in (inputs["x"], strided):
        result = named_operators.transition(**(inputs | {"x": x}), residual=x, out=x, backend=backend)
        assert result is x
        assert relative_error(x, expected) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", ["x", *PARAMETERS])
def test_one_gradient_alone(wanted: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=32, BH=64)
    inputs = _inputs(9, 12)
    check_against_definition(
        _on(backend), reference.transition, inputs, torch.float32, set(inputs) - {wanted}
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_give_no_result_and_gradients_of_zero(backend: str) -> None:
    inputs = {k: x.float().to(DEVICE).requires_grad_() for k, x in _inputs(0, 3, 12).items()}
    out = named_operators.transition(**inputs, backend=backend)
    assert out.shape == (0, 3, 12)
    out.sum().backward()
    assert all(torch.count_nonzero(x.grad) == 0 for x in inputs.values())


def test_wider_rows_take_the_torch_path() -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(2, 257, hidden=16).items()}
    assert torch.equal(
        named_operators.transition(**inputs, backend="triton"),
        named_operators.transition(**inputs, backend="torch"),
    )


def test_rows_beyond_two_to_the_31_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=16, BH=64)
    inputs = {k: x.to(DEVICE, torch.bfloat16) for k, x in _inputs(3, 12).items()}
    x = far_apart(inputs["x"], tmp_path / "rows")
    out = torch.empty(3, 12, dtype=torch.bfloat16, device=DEVICE)
    named_operators.transition(**(inputs | {"x": x}), out=out, backend="triton")
    assert relative_error(out, reference.transition(**{k: v.double() for k, v in inputs.items()})) < 5e-3
    grad = far_apart(torch.randn(x.shape).to(DEVICE), tmp_path / "gradient")
    rest = ([], [inputs[name] for name in PARAMETERS], True, [True] * 7, "triton")
    backward = torch.ops.fastfold.transition_backward
    near = backward(grad.contiguous(), inputs["x"], *rest)
    for found, value in zip(backward(grad, x, *rest), near, strict=True):
        assert torch.equal(found, value)
    for name in ("rows", "gradient"):
        (tmp_path / name).unlink(missing_ok=True)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_are_registered_properly(backend: str) -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(2, 3, 12).items()}
    x, *parameters = (v.requires_grad_() for v in inputs.values())
    residual = torch.randn_like(x).requires_grad_()
    for arguments in ((x, residual, False), (x, None, True)):
        operator = (*arguments, parameters, backend == "torch", backend)
        torch.library.opcheck(torch.ops.fastfold.transition.default, operator)
    plain = [p.detach() for p in parameters]
    needs = [True, True, False, True, True, True, False]
    arguments = (torch.randn_like(x), x.detach(), [], plain, True, needs, backend)
    torch.library.opcheck(torch.ops.fastfold.transition_backward.default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend: str) -> None:
    inputs = {k: x.float().to(DEVICE).requires_grad_() for k, x in _inputs(5, 12).items()}

    def step(**tensors: Tensor) -> Tensor:
        return named_operators.transition(**tensors, residual=tensors["x"], backend=backend).square().sum()

    eager = torch.autograd.grad(step(**inputs), list(inputs.values()))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**inputs)
    for found, expected in zip(torch.autograd.grad(compiled, list(inputs.values())), eager, strict=True):
        torch.testing.assert_close(found, expected)


def _exact(inputs: dict[str, Any], residual: Tensor) -> Tensor:
    x = inputs["x"]
    spread = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    normed = spread * inputs["norm_weight"] + inputs["norm_bias"]
    return residual + (normed @ inputs["w1"].T + inputs["b1"]).clamp(min=0) @ inputs["w2"].T + inputs["b2"]


def test_passes_fill_what_they_are_given_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes of PyTorch in blocks of 4 positions, and Triton's, onto the residual; with gradients as needed."""
    monkeypatch.setattr(op, "gradient_positions", lambda *sizes: 4)
    monkeypatch.setattr(block_threads, "block_positions", lambda channels: 4)
    monkeypatch.setattr(block_threads, "forward_positions", lambda channels, positions, dtype: 4)
    made = _inputs(3, 7, 12)
    residual, grad = torch.randn(2, 3, 7, 12, dtype=torch.float64)
    exact = _exact(made, residual)
    small = {name: x.float().to(DEVICE) for name, x in made.items()}
    x, parameters = small["x"], op.TransitionParams(*(small[name] for name in PARAMETERS))
    for fill in (
        lambda out: op.forward(out, x, parameters, out, Scratch()),
        lambda out: triton_fwd.forward(out, x, parameters, out),
    ):
        out = residual.float().to(DEVICE)
        fill(out)
        assert relative_error(out, exact) < 1e-6
    leaves = {name: value.requires_grad_() for name, value in made.items()}
    expected = torch.autograd.grad(_exact(leaves, leaves["x"]), list(leaves.values()), grad)
    double = op.TransitionParams(*(made[name].detach() for name in PARAMETERS))
    found = op.backward(grad, made["x"].detach(), double, True, [True] * 7)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert relative_error(mine, theirs) < 1e-12
    needs = [True, False, False, True, False, False, True]
    partly = op.backward(grad, made["x"].detach(), double, False, needs)
    assert [value is not None for value in partly] == needs
    assert partly[0] is not None
    assert relative_error(partly[0] + grad, expected[0]) < 1e-12
