"""The fused softmax equals its definition, on both backends, and no row is ever NaN."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.kernels import reference
from fastfold.kernels.ops.softmax import triton_fwd
from tests.helpers.kernel_checks import (
    BACKENDS,
    DEVICE,
    DTYPES,
    check_against_definition,
    output_and_gradients,
    relative_error,
)


def _inputs(*shape: int, bias: bool = True, mask: bool = True) -> dict[str, Any]:
    torch.manual_seed(sum(shape))
    *batch, rows, heads, queries, keys = shape
    keep = (torch.rand(*batch, rows, keys) > 0.3).double()
    keep.view(-1, keys)[0] = 0.0  # a row without any key
    return {
        "scores": 3 * torch.randn(*shape, dtype=torch.float64),
        "bias": 2 * torch.randn(*batch, heads, queries, keys, dtype=torch.float64) if bias else None,
        "mask": keep if mask else None,
    }


def _on(backend: str) -> Any:
    return lambda **inputs: kernels.softmax(**inputs, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 2, 17, 17), (2, 1, 3, 129), (2, 2, 3, 2, 5, 33)])
def test_output_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    check_against_definition(_on(backend), reference.softmax, _inputs(*shape), dtype, {"mask"})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_bias_and_mask_are_optional(bias: bool, mask: bool, backend: str) -> None:
    inputs = _inputs(3, 2, 5, 7, bias=bias, mask=mask)
    check_against_definition(_on(backend), reference.softmax, inputs, torch.float32, {"mask"})


@pytest.mark.parametrize("keys", [1000, 4096, 4097])
def test_long_rows(keys: int) -> None:
    inputs = _inputs(2, 1, 2, keys)
    check_against_definition(_on("triton"), reference.softmax, inputs, torch.float32, {"mask"})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_where_one_key_has_nearly_all_weight(dtype: torch.dtype, backend: str) -> None:
    """They are differences of nearly equal numbers, which only cancel if the rounded weights add up to 1."""
    inputs = _inputs(2, 1, 3, 17, bias=False, mask=False)
    inputs["scores"][..., 3] = 9.0
    check_against_definition(_on(backend), reference.softmax, inputs, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_keys_has_equal_weights_and_no_gradient(backend: str) -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 2, 5, 7).items()}
    found = output_and_gradients(_on(backend), inputs, {"mask"})
    assert torch.equal(found["output"][0], torch.full((2, 5, 7), 1 / 7, device=DEVICE))
    assert torch.count_nonzero(found["scores"][0]) == 0
    masked = (inputs["mask"] == 0)[:, None, None, :].expand_as(found["scores"])
    assert torch.count_nonzero(found["scores"][masked]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_masks_of_any_dtype(dtype: torch.dtype, backend: str) -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 2, 5, 7).items()}
    exact = reference.softmax(**inputs)
    out = kernels.softmax(**(inputs | {"mask": inputs["mask"].to(dtype)}), backend=backend)
    assert relative_error(out, exact) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend: str) -> None:
    def transposed(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    inputs = _inputs(2, 3, 2, 6, 6)
    inputs["scores"] = inputs["scores"].transpose(-1, -2)
    inputs["bias"] = inputs["bias"][:1].expand(2, -1, -1, -1)
    inputs["mask"] = transposed(inputs["mask"])
    check_against_definition(_on(backend), reference.softmax, inputs, torch.float32, {"mask"})
    wide = torch.randn(2, 6, 2, 12, 13).to(DEVICE)
    out = kernels.softmax(wide[:, ::2, :, ::2, 3:9], backend=backend)
    assert relative_error(out, wide[:, ::2, :, ::2, 3:9].double().softmax(-1)) < 1e-6


def test_gradient_of_the_bias_is_summed_over_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 6 programs for 7 rows there are chunks of 2, the last one of which is not full."""
    monkeypatch.setattr("fastfold.kernels.ops.softmax.triton_bwd.PROGRAMS", 8)
    inputs = _inputs(7, 2, 5, 40)
    check_against_definition(_on("triton"), reference.softmax, inputs, torch.float32, {"mask"})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 3), (0, 2, 2, 3, 3)])
def test_empty_inputs_give_empty_results(shape: tuple[int, ...], backend: str) -> None:
    scores = torch.randn(*shape, device=DEVICE, requires_grad=True)
    bias = torch.randn(*shape[:-4], *shape[-3:], device=DEVICE, requires_grad=True)
    out = kernels.softmax(scores, bias, torch.ones(*shape[:-3], 3, device=DEVICE), backend=backend)
    assert out.shape == shape
    out.sum().backward()
    assert scores.grad.shape == shape
    assert torch.count_nonzero(bias.grad) == 0


@pytest.mark.parametrize("wanted", ["scores", "bias"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_gradient_alone(wanted: str, backend: str) -> None:
    inputs = _inputs(3, 2, 5, 7)
    constants = {"scores", "bias", "mask"} - {wanted}
    check_against_definition(_on(backend), reference.softmax, inputs, torch.float32, constants)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_is_registered_properly(backend: str) -> None:
    scores, bias, mask = (x.float().to(DEVICE) for x in _inputs(3, 2, 5, 7).values())
    leaves = scores.clone().requires_grad_(), bias.clone().requires_grad_()
    torch.library.opcheck(torch.ops.fastfold.softmax.default, (*leaves, mask, backend))
    torch.library.opcheck(torch.ops.fastfold.softmax.default, (leaves[0], None, None, backend))
    arguments = (torch.randn_like(scores), scores.softmax(-1), mask, [True, True], backend)
    torch.library.opcheck(torch.ops.fastfold.softmax_backward.default, arguments)


def test_kernel_writes_weights_of_strided_scores() -> None:
    """Row by row: a bias for all rows, a mask of bools, and a row without keys, whose weights are equal."""
    torch.manual_seed(0)
    b, r, h, q, k = 2, 3, 2, 5, 7
    scores = torch.randn(b, h, r, q, k + 2).transpose(1, 2)[..., 1:-1]
    bias, mask = torch.randn(b, h, k, q).mT, torch.rand(b, r, k) > 0.3
    mask[1, 2] = False
    out = torch.full((b, r, h, q, k), torch.nan, device=DEVICE)
    triton_fwd.softmax_forward(out, *(x.to(DEVICE) for x in (scores, bias, mask)))
    for i, j in itertools.product(range(b), range(r)):
        weights = (scores[i, j].double() + bias[i].double()).exp() * mask[i, j]
        expected = (
            weights / weights.sum(-1, keepdim=True) if mask[i, j].any() else torch.full((h, q, k), 1 / k)
        )
        assert relative_error(out[i, j], expected) < 1e-6


def test_masks_are_read_as_bytes_or_numbers() -> None:
    given = torch.tensor([True, False])
    found = triton_fwd.readable(given)
    assert found is not None
    assert (found.dtype, found.tolist(), found.data_ptr()) == (torch.uint8, [1, 0], given.data_ptr())
    numbers = torch.ones(3, 4).t()
    read = triton_fwd.readable(numbers)
    assert read is not None
    assert read.stride(-1) == 1
    assert triton_fwd.readable(None) is None
