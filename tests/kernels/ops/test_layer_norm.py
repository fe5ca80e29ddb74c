"""The fused normalisation equals its definition, on both backends, for every layout of its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.kernels import reference
from tests.helpers.kernel_checks import BACKENDS, DEVICE, DTYPES, check_against_definition, relative_error


def _inputs(*shape: int, weight: bool = True, bias: bool = True) -> dict[str, Any]:
    torch.manual_seed(sum(shape))
    c = shape[-1]
    return {
        "x": 3 + 2 * torch.randn(*shape, dtype=torch.float64),
        "weight": 1 + 0.3 * torch.randn(c, dtype=torch.float64) if weight else None,
        "bias": torch.randn(c, dtype=torch.float64) if bias else None,
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (17, 21), (129, 16), (5, 384)])
def test_output_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    inputs = _inputs(*shape) | {"backend": backend}

    def definition(x: Tensor, weight: Tensor, bias: Tensor, backend: str) -> Tensor:
        return reference.layer_norm(x, weight, bias)

    check_against_definition(kernels.layer_norm, definition, inputs, dtype)


@pytest.mark.parametrize("c", [1000, 4096, 4097])
def test_long_rows(c: int) -> None:
    inputs = _inputs(3, c)
    check_against_definition(_triton, reference.layer_norm, inputs, torch.float32)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_scale_and_shift_are_optional(weight: bool, bias: bool) -> None:
    inputs = _inputs(9, 12, weight=weight, bias=bias)
    check_against_definition(_triton, reference.layer_norm, inputs, torch.float32)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-2, -3)


def _scattered(x: Tensor) -> Tensor:
    """Four leading axes of which no two merge."""
    wide = x.new_zeros(*(2 * n for n in x.shape[:-1]), x.shape[-1])
    view = wide[tuple(slice(None, None, 2) for _ in x.shape[:-1])]
    return view.copy_(x)


@pytest.mark.parametrize(
    "change",
    [
        _transposed,
        _scattered,
        lambda x: x.mT.contiguous().mT,
        lambda x: x[..., :1, :].expand_as(x),
        lambda x: x[:, :, ::2, 1:],
        lambda x: x[:0],
    ],
    ids=["transposed", "scattered", "channels apart", "expanded", "slices", "empty"],
)
def test_any_strides(change: Any) -> None:
    """The gradient's strides are those of the input's, too: it is taken of the same view."""
    inputs = _inputs(2, 3, 4, 5, 12) if change is _scattered else _inputs(2, 3, 5, 12)
    x = change(inputs["x"].float().to(DEVICE)).detach().requires_grad_()
    c = x.shape[-1]
    weight, bias = (inputs[k][:c].float().to(DEVICE).requires_grad_() for k in ("weight", "bias"))
    out = kernels.layer_norm(x, weight, bias, backend="triton")
    exact = reference.layer_norm(x.double(), weight.double(), bias.double())
    assert out.is_contiguous()
    assert out.shape == exact.shape
    grad = change(torch.randn_like(inputs["x"]).float()).to(DEVICE)
    found = torch.autograd.grad(out, (x, weight, bias), grad)
    wanted = torch.autograd.grad(exact, (x, weight, bias), grad.double())
    for value, right in zip((out, *found), (exact, *wanted), strict=True):
        assert relative_error(value, right) < 2e-6


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_gradient_alone(wanted: str, backend: str) -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(7, 12).items()}
    inputs[wanted].requires_grad_()
    kernels.layer_norm(**inputs, backend=backend).square().sum().backward()
    exact = {k: x.detach().double() for k, x in inputs.items()}
    exact[wanted].requires_grad_()
    reference.layer_norm(**exact).square().sum().backward()
    assert relative_error(inputs[wanted].grad, exact[wanted].grad) < 2e-6


def test_gradients_of_parameters_are_summed_over_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program walks over several blocks, and the last block is not full."""
    monkeypatch.setattr("fastfold.kernels.ops.layer_norm.triton_bwd.PROGRAMS", 3)
    check_against_definition(_triton, reference.layer_norm, _inputs(129, 130), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_is_registered_properly(backend: str) -> None:
    x, weight, bias = (
        v.float().to(DEVICE).requires_grad_() for v in _inputs(3, 4, 12).values() if v is not None
    )
    torch.library.opcheck(torch.ops.fastfold.layer_norm.default, (x, weight, bias, 1e-5, backend))
    torch.library.opcheck(torch.ops.fastfold.layer_norm.default, (x, None, None, 1e-5, backend))
    arguments = (torch.randn_like(x), x.detach(), weight.detach(), 1e-5, [True, False, True], backend)
    torch.library.opcheck(torch.ops.fastfold.layer_norm_backward.default, arguments)


def _triton(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return kernels.layer_norm(x, weight, bias, backend="triton")
