"""Triangle multiplication equals its definition on both backends, and its temporaries are as large as it says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.kernels import reference
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.ops.triangle_multiplication.params import EPS
from tests.helpers import named_operators
from tests.helpers.forced_blocks import CHUNKS, WHOLE, force_blocks
from tests.helpers.kernel_checks import (
    BACKENDS,
    DEVICE,
    check_against_definition,
    far_apart,
    relative_error,
)


def _inputs(n: int, c_z: int = 12, c: int = 20, batch: tuple[int, ...] = ()) -> dict[str, Any]:
    torch.manual_seed(n + c)

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*size, dtype=torch.float64)

    mask = (torch.rand(*batch, n, n) > 0.3).double()
    mask.view(-1, n)[0] = 0.0
    return {
        "z": randn(*batch, n, n, c_z),
        "mask": mask,
        "norm_in_weight": 1 + randn(c_z, scale=0.2),
        "norm_in_bias": randn(c_z, scale=0.2),
        "proj_weight": randn(2 * c, c_z, scale=c_z**-0.5),
        "proj_bias": randn(2 * c),
        "gate_weight": randn(2 * c, c_z, scale=c_z**-0.5),
        "gate_bias": randn(2 * c),
        "norm_out_weight": 1 + randn(c, scale=0.2),
        "norm_out_bias": randn(c, scale=0.2),
        "out_weight": randn(c_z, c, scale=c**-0.5),
        "out_bias": randn(c_z),
        "out_gate_weight": randn(c_z, c_z, scale=c_z**-0.5),
        "out_gate_bias": randn(c_z),
    }


def _on(backend: str, **rest: Any) -> Callable[..., Tensor]:
    return lambda **inputs: named_operators.triangle_multiplication(**inputs, **rest, backend=backend)


def _definition(outgoing: bool) -> Callable[..., Tensor]:
    return lambda **inputs: reference.triangle_multiplication(**inputs, outgoing=outgoing)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("n", [1, pytest.param(9, marks=pytest.mark.slow), 17])
def test_output_and_gradients_in_float32(
    n: int, outgoing: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_blocks(monkeypatch, BM=64, BH=64, BO=16, BK=CHUNKS)
    check_against_definition(
        _on(backend, outgoing=outgoing), _definition(outgoing), _inputs(n), torch.float32, {"mask"}
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "outgoing"),
    [
        pytest.param(torch.bfloat16, True, id="bfloat16-outgoing"),
        pytest.param(torch.float16, False, id="float16-incoming"),
        pytest.param(torch.bfloat16, False, id="bfloat16-incoming", marks=pytest.mark.slow),
        pytest.param(torch.float16, True, id="float16-outgoing", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("n", "c_z", "c"),
    [(1, 12, 8), pytest.param(13, 12, 8, marks=pytest.mark.slow), (17, 8, 16), (13, 32, 32)],
)
def test_output_and_gradients_in_half_precision(
    n: int,
    c_z: int,
    c: int,
    outgoing: bool,
    dtype: torch.dtype,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second normalisation has rows of little variance where there are few channels."""
    force_blocks(monkeypatch, BM=128, BH=64, BO=64, BK=WHOLE)
    inputs = _inputs(n, c_z, c)
    check_against_definition(_on(backend, outgoing=outgoing), _definition(outgoing), inputs, dtype, {"mask"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_large_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 rows with 128 channels compute the statistics of the product again."""
    force_blocks(monkeypatch, BM=64, BH=64, BO=32, BK=WHOLE)
    inputs = _inputs(9, 128, 128)
    check_against_definition(
        _on("triton", outgoing=True), _definition(outgoing=True), inputs, dtype, {"mask"}
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outgoing", [True, False])
def test_sums_that_float16_cannot_hold(outgoing: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of thousands add up to more than 65,504 over the residues, and their mean does not."""
    force_blocks(monkeypatch, BM=256, BH=64, BO=64, BK=WHOLE)
    inputs = _inputs(20, 8, 32)
    inputs["proj_bias"] *= 40
    inputs["gate_bias"] += 3
    assert _products(outgoing, inputs).abs().max() > 65_504
    check_against_definition(
        _on(backend, outgoing=outgoing), _definition(outgoing), inputs, torch.float16, {"mask"}
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outgoing", [True, False])
def test_small_sums_in_float16_keep_their_eps(
    outgoing: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product whose variance is of the size of what the second normalisation adds to it."""
    force_blocks(monkeypatch, BM=128, BH=64, BO=64, BK=WHOLE)
    inputs = _inputs(9, 8, 32)
    for name in ("proj_weight", "proj_bias"):
        inputs[name] *= 0.05
    products = _products(outgoing, inputs)
    assert 0.1 < products.var(-1).median() / EPS < 10
    check_against_definition(
        _on(backend, outgoing=outgoing), _definition(outgoing), inputs, torch.float16, {"mask"}
    )


def _products(outgoing: bool, inputs: dict[str, Any]) -> Tensor:
    """What the second normalisation gets, ``[N, N, c]``."""
    names = {"norm_weight": "norm_in_weight", "norm_bias": "norm_in_bias"}
    names |= {name: name for name in inputs if name.startswith(("proj", "gate"))}
    factors = reference.triangle_factors(
        inputs["z"], inputs["mask"], **{name: inputs[source] for name, source in names.items()}
    )
    left, right = factors.chunk(2)
    return (left @ right.mT if outgoing else right.mT @ left).movedim(0, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outgoing", [True, False])
def test_residual_dropout_batches_and_strides(
    outgoing: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_blocks(monkeypatch, BM=32, BH=64, BO=64)
    inputs = _inputs(5, batch=(2,))
    inputs["z"] = inputs["z"].transpose(1, 3).contiguous().transpose(1, 3)
    inputs["mask"] = inputs["mask"].transpose(1, 2)
    inputs["residual"] = torch.randn(2, 5, 5, 12, dtype=torch.float64).transpose(1, 2)
    inputs["dropout"] = (torch.rand(2, 1, 5, 12) > 0.25).double() / 0.75

    def definition(residual: Tensor, dropout: Tensor, **rest: Tensor) -> Tensor:
        return residual + dropout * _definition(outgoing)(**rest)

    constants = {"mask", "dropout"}
    check_against_definition(_on(backend, outgoing=outgoing), definition, inputs, torch.float32, constants)


@pytest.mark.parametrize("backend", BACKENDS)
def test_its_own_input_as_residual(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=64, BH=64, BO=64)

    def function(z: Tensor, **rest: Tensor) -> Tensor:
        return named_operators.triangle_multiplication(z, **rest, residual=z, outgoing=True, backend=backend)

    def definition(z: Tensor, **rest: Tensor) -> Tensor:
        return z + _definition(True)(z=z, **rest)

    check_against_definition(function, definition, _inputs(9), torch.float32, {"mask"})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outgoing", [True, False])
def test_in_place(outgoing: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=16, BH=64)
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(9).items()}
    z = inputs["z"].clone()
    dropout = (torch.rand(9, 1, 12, device=DEVICE) > 0.25).float() / 0.75
    rest = {k: x for k, x in inputs.items() if k != "z"}
    function = named_operators.triangle_multiplication
    result = function(z, **rest, outgoing=outgoing, residual=z, dropout=dropout, out=z, backend=backend)
    assert result is z
    assert relative_error(z, inputs["z"] + dropout * _definition(outgoing)(**inputs)) < 1e-6


def test_more_blocks_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=16, BH=64, BO=64)
    for module in ("triton_update", "triton_factors"):
        monkeypatch.setattr(f"fastfold.kernels.ops.triangle_multiplication.{module}.PROGRAMS", 2)
    monkeypatch.setattr("fastfold.kernels.common.normalized_rows.WEIGHT_PROGRAMS", 2)
    check_against_definition(
        _on("triton", outgoing=True), _definition(True), _inputs(9), torch.float32, {"mask"}
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", ["z", "norm_in_bias", "gate_bias", "norm_out_weight", "out_gate_bias"])
def test_one_gradient_alone(wanted: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=32, BH=64, BO=64)
    inputs = _inputs(4)
    check_against_definition(
        _on(backend, outgoing=True), _definition(True), inputs, torch.float32, set(inputs) - {wanted}
    )


def test_wider_rows_take_the_torch_path() -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(2, 257, 4).items()}
    results = [_on(backend, outgoing=True)(**inputs) for backend in BACKENDS]
    assert torch.equal(*results)


@pytest.mark.parametrize("outgoing", [True, False])
def test_temporaries_forward_are_two_pair_tensors(outgoing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product, and the factors of half its channels, of 17 residues as of 24."""
    force_blocks(monkeypatch, BM=128, BH=64)
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(17, 16, 16).items()}
    z, scratch = inputs["z"], Scratch()
    _on("triton", outgoing=outgoing)(**inputs, residual=z, out=z, scratch=scratch)
    assert sum(buffer.numel() for buffer in scratch.buffers.values()) == 2 * 24 * 24 * 16


def test_temporaries_of_large_pair_tensors_are_one_and_a_half() -> None:
    from fastfold.kernels.ops.triangle_multiplication.triton_launch import channel_group

    assert 1 + 2 * channel_group(128, 1000**2) / 128 == 2.0
    for n in (2048, 4096):
        assert 1 + 2 * channel_group(128, n**2) / 128 == 1.5


@pytest.mark.parametrize("axis", [0, 1])
def test_pairs_beyond_two_to_the_31_elements(
    axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_blocks(monkeypatch, BM=16, BH=64)
    inputs = {k: x.to(DEVICE, torch.bfloat16) for k, x in _inputs(3).items()}
    expected = _definition(True)(**{k: x.double() for k, x in inputs.items()})
    rows = inputs["z"].transpose(0, axis).flatten(1)
    inputs["z"] = far_apart(rows, tmp_path / "pairs").unflatten(1, (3, 12)).transpose(0, axis)
    out = torch.empty(3, 3, 12, dtype=torch.bfloat16, device=DEVICE)
    _on("triton", outgoing=True)(**inputs, out=out)
    assert relative_error(out, expected) < 5e-3
    z, mask, *parameters = inputs.values()
    far = far_apart(torch.randn(rows.shape).to(DEVICE), tmp_path / "gradient")
    grad = far.unflatten(1, (3, 12)).transpose(0, axis)
    options = {"outgoing": True, "add_z": True, "needs": [True] * 13, "backend": "triton"}
    rest = (None, parameters)
    backward = functools.partial(torch.ops.fastfold.triangle_multiplication_backward, **options)
    near = backward(grad.contiguous(), z.contiguous(), [], mask, *rest)
    for found, value in zip(backward(grad, z, [], mask, *rest), near, strict=True):
        assert torch.equal(found, value)
    for name in ("pairs", "gradient"):
        (tmp_path / name).unlink(missing_ok=True)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_are_registered_properly(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=32, BH=64, BO=64)
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3).items()}
    z, mask, *parameters = inputs.values()
    leaves = [x.clone().requires_grad_() for x in (z, *parameters)]
    dropout = torch.ones(3, 1, 12, device=DEVICE)
    arguments = (leaves[0], mask, torch.randn_like(z), dropout, leaves[1:])
    options = {"outgoing": True, "add_z": False, "keep": backend == "torch", "backend": backend}
    torch.library.opcheck(torch.ops.fastfold.triangle_multiplication.default, arguments, options)
    options = {"outgoing": False, "add_z": True, "needs": [True, False] + [True] * 11, "backend": backend}
    arguments = (torch.randn_like(z), z, [], mask, None, parameters)
    torch.library.opcheck(torch.ops.fastfold.triangle_multiplication_backward.default, arguments, options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=32, BH=64, BO=64)
    inputs = {k: x.float().to(DEVICE).requires_grad_(k != "mask") for k, x in _inputs(4).items()}
    leaves = [x for x in inputs.values() if x.requires_grad]

    def step(**tensors: Tensor) -> Tensor:
        return _on(backend, outgoing=True)(**tensors, residual=tensors["z"]).square().sum()

    eager = torch.autograd.grad(step(**inputs), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**inputs)
    for found, expected in zip(torch.autograd.grad(compiled, leaves), eager, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_factors_and_update_around_a_contraction_are_the_whole_operator(backend: str, inplace: bool) -> None:
    """With the residual and dropout, for rows of two batch elements."""
    torch.manual_seed(0)
    c, c_z = 8, 12
    with DEVICE:
        z, mask = torch.randn(2, 5, 5, c_z), (torch.rand(2, 5, 5) > 0.3).float()
        norm_in, norm_out = ({"weight": torch.rand(k), "bias": torch.randn(k)} for k in (c_z, c))
        sides = {"proj_weight": torch.randn(2 * c, c_z), "proj_bias": torch.randn(2 * c)}
        sides |= {"gate_weight": torch.randn(2 * c, c_z), "gate_bias": torch.randn(2 * c)}
        ends = {"out_weight": torch.randn(c_z, c), "out_bias": torch.randn(c_z)}
        ends |= {"out_gate_weight": torch.randn(c_z, c_z), "out_gate_bias": torch.randn(c_z)}
        ends |= {f"norm_out_{k}": x for k, x in norm_out.items()}
        dropout = 2 * (torch.rand(2, 1, 5, c_z) > 0.5).float()
    whole = named_operators.triangle_multiplication(
        z, mask, **{f"norm_in_{k}": x for k, x in norm_in.items()}, **sides, **ends, outgoing=True,
        residual=z, dropout=dropout, backend=backend,
    )  # fmt: skip
    norm = {f"norm_{k}": x for k, x in norm_in.items()}
    left, right = named_operators.triangle_factors(z, mask, **norm, **sides, backend=backend).chunk(2, dim=-3)
    rest = {"add_z": True, "dropout": dropout, "backend": backend, "out": z if inplace else None}
    found = named_operators.triangle_update(left @ right.mT, z, **norm, **ends, **rest)
    assert (found is z) == inplace
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
