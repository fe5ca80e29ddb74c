"""The bias of attention heads equals its definition, on both backends."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.kernels import reference
from fastfold.kernels.ops.pair_bias.params import PairBiasParams
from fastfold.kernels.ops.pair_bias.triton_fwd import pair_bias_forward
from tests.helpers.compiler import run_program
from tests.helpers.kernel_checks import BACKENDS, DEVICE, DTYPES, check_against_definition, relative_error


def _inputs(*shape: int, heads: int = 4) -> dict[str, Any]:
    torch.manual_seed(sum(shape))
    c = shape[-1]
    return {
        "z": 1 + 2 * torch.randn(*shape, dtype=torch.float64),
        "norm_weight": 1 + 0.3 * torch.randn(c, dtype=torch.float64),
        "norm_bias": torch.randn(c, dtype=torch.float64),
        "weight": torch.randn(heads, c, dtype=torch.float64) / c**0.5,
    }


def _triton(z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor) -> Tensor:
    return kernels.pair_bias(z, norm_weight, norm_bias, weight, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        ((1, 1, 5), 1),
        pytest.param((9, 17, 21), 3, marks=pytest.mark.slow),
        ((5, 129, 16), 4),
        ((3, 5, 128), 8),
    ],
)
def test_output_and_gradients(shape: tuple[int, ...], heads: int, dtype: torch.dtype) -> None:
    check_against_definition(_triton, reference.pair_bias, _inputs(*shape, heads=heads), dtype)


@pytest.mark.parametrize(("channels", "heads"), [(256, 17), (257, 2), (12, 33)])
def test_wide_pairs_and_many_heads(channels: int, heads: int) -> None:
    check_against_definition(
        _triton, reference.pair_bias, _inputs(2, 9, channels, heads=heads), torch.float32
    )


def test_gradients_of_parameters_are_summed_over_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastfold.kernels.ops.pair_bias.triton_bwd.PROGRAMS", 2)
    check_against_definition(_triton, reference.pair_bias, _inputs(13, 17, 12), torch.float32)


def _apart(z: Tensor) -> Tensor:
    wide = z.new_zeros(*(2 * n for n in z.shape[:-1]), z.shape[-1])
    return wide[tuple(slice(None, None, 2) for _ in z.shape[:-1])].copy_(z)


@pytest.mark.parametrize("change", [lambda z: z.transpose(-2, -3), _apart, lambda z: z.mT.contiguous().mT])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_strides_and_batch_axes(batch: tuple[int, ...], change: Any) -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(*batch, 5, 7, 12).items()}
    inputs["z"] = change(inputs["z"])
    leaves = {k: x.detach().requires_grad_() for k, x in inputs.items()}
    exact = {k: x.detach().double().requires_grad_() for k, x in inputs.items()}
    out, right = _triton(**leaves), reference.pair_bias(**exact)
    assert relative_error(out, right) < 2e-6
    grad = torch.randn_like(right).transpose(-1, -2).contiguous().transpose(-1, -2)
    found = torch.autograd.grad(out, list(leaves.values()), grad.float())
    for value, wanted in zip(
        found, torch.autograd.grad(right, list(exact.values()), grad.float().double()), strict=True
    ):
        assert relative_error(value, wanted) < 2e-6


@pytest.mark.parametrize("wanted", ["z", "norm_weight", "norm_bias", "weight"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_gradient_alone(wanted: str, backend: str) -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 5, 12).items()}
    inputs[wanted].requires_grad_()
    kernels.pair_bias(**inputs, backend=backend).square().sum().backward()
    exact = {k: x.detach().double() for k, x in inputs.items()}
    exact[wanted].requires_grad_()
    reference.pair_bias(**exact).square().sum().backward()
    assert relative_error(inputs[wanted].grad, exact[wanted].grad) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_operator_is_registered_properly(backend: str) -> None:
    tensors = [x.float().to(DEVICE) for x in _inputs(3, 4, 12).values()]
    leaves = [x.detach().requires_grad_() for x in tensors]
    torch.library.opcheck(torch.ops.fastfold.pair_bias.default, (leaves[0], leaves[1:], backend))
    arguments = (torch.randn(4, 3, 4).to(DEVICE), tensors[0], tensors[1:], [True] * 4, backend)
    torch.library.opcheck(torch.ops.fastfold.pair_bias_backward.default, arguments)


def test_the_kernel_puts_heads_in_front_of_a_cut_out_pair() -> None:
    """Of a part of a larger pair, with a batch; channels are normalised over those that there are."""
    made = _inputs(2, 6, 9, 21, heads=3)
    z = made["z"][:, :5, 1:8]
    parameters = PairBiasParams(*(made[name] for name in PairBiasParams._fields))
    spread = (z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    exact = torch.einsum(
        "bijc,hc->bhij", spread * parameters.norm_weight + parameters.norm_bias, parameters.weight
    )
    small = PairBiasParams(*(x.float().to(DEVICE) for x in parameters))
    whole = made["z"].float().to(DEVICE)
    found = pair_bias_forward(whole[:, :5, 1:8], small, 1e-5)
    assert relative_error(found, exact) < 1e-6
    assert pair_bias_forward(whole[:, :0], small, 1e-5).shape == (2, 3, 0, 9)


STORES = """
import json
import torch
from benchmarks.kernels.compilation import no_gpu
from benchmarks.kernels.machine_code import listing
from benchmarks.kernels.recording import launches_replaced
from fastfold.kernels.ops.pair_bias.params import PairBiasParams
from fastfold.kernels.ops.pair_bias.triton_fwd import pair_bias_forward

z, norm = torch.empty(5, 21, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, device="meta")
parameters, launches = PairBiasParams(norm, norm, z[0, :4]), []
with launches_replaced(lambda kernel, grid: lambda *a, **options: launches.append((kernel, a, options))):
    pair_bias_forward(z, parameters, 1e-5, multiple=16)
(kernel, arguments, options), = launches
with no_gpu(90):
    code = listing(kernel.run(*arguments, grid=(1,), warmup=True, **options))
print(json.dumps([instruction.name for instruction in code if instruction.name.startswith("STG")]))
"""


@pytest.mark.long
def test_heads_are_stored_16_bytes_at_a_time() -> None:
    assert run_program(STORES) == [["STG.E.128"]]


def test_parameters_stand_in_the_order_of_the_arguments() -> None:
    names = tuple(inspect.signature(kernels.pair_bias).parameters)
    assert names[1:4] == PairBiasParams._fields


@pytest.mark.parametrize("length", [16, 21])
def test_rows_can_lie_as_attention_wants_them(length: int) -> None:
    """The same numbers, in memory that is not copied again."""
    inputs = {name: x.to(DEVICE, torch.float32) for name, x in _inputs(9, length, 16).items()}
    with torch.no_grad():
        found = kernels.pair_bias(**inputs, aligned=True, backend="triton")
        expected = kernels.pair_bias(**inputs, backend="triton")
    # A position's place in a tile differs where rows are padded, and with it the interpreter's order of a sum.
    assert relative_error(found, expected) < 1e-7
    assert found.stride(-2) == -(-length // 16) * 16
    with torch.no_grad():
        assert kernels.attention_bias(found, 8, backend="triton") is found
    # With gradients, and on the CPU, they are next to each other.
    assert kernels.pair_bias(**inputs, aligned=True, backend="triton").is_contiguous()
    with torch.no_grad():
        assert kernels.pair_bias(**inputs, aligned=True, backend="torch").is_contiguous()
