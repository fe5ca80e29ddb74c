"""Kernels with tiles by descriptors compute triangle multiplication, and serve what they say and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from benchmarks.kernels.recording import launches_replaced
from fastfold import kernels
from fastfold.kernels import reference
from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.ops.triangle_multiplication import triton_tiles
from fastfold.kernels.ops.triangle_multiplication.params import (
    EPS,
    FactorParams,
    TriangleParams,
    UpdateParams,
)
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from tests.helpers.compiler import run_program
from tests.helpers.kernel_checks import DEVICE, relative_error

needs_tiles = pytest.mark.skipif(
    not interpreted() and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)),
    reason="needs Triton's interpreter or a Hopper GPU",
)


@pytest.fixture(autouse=True)
def requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are asked for."""
    monkeypatch.setenv(triton_tiles.VARIABLE, "1")


def _randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape)).to(DEVICE, torch.bfloat16)


def _inputs(n: int, c_z: int = 128, c: int = 128) -> tuple[Tensor, Tensor, TriangleParams]:
    """A pair whose rows have means of their own, a mask, and parameters."""
    torch.manual_seed(n)
    z = _randn(n, n, c_z, scale=1.5) + _randn(n, n, 1, scale=2.0)
    mask = (torch.rand(n, n) > 0.1).to(DEVICE, torch.bfloat16)
    norms = [
        1 + _randn(c_z, scale=0.2),
        _randn(c_z, scale=0.2),
        1 + _randn(c, scale=0.2),
        _randn(c, scale=0.2),
    ]
    parameters = TriangleParams(
        norm_in_weight=norms[0].float(),
        norm_in_bias=norms[1].float(),
        proj_weight=_randn(2 * c, c_z, scale=c_z**-0.5),
        proj_bias=_randn(2 * c, scale=0.2),
        gate_weight=_randn(2 * c, c_z, scale=c_z**-0.5),
        gate_bias=1 + _randn(2 * c, scale=0.2),
        norm_out_weight=norms[2].float(),
        norm_out_bias=norms[3].float(),
        out_weight=_randn(c_z, c, scale=c**-0.5),
        out_bias=_randn(c_z, scale=0.2),
        out_gate_weight=_randn(c_z, c_z, scale=c_z**-0.5),
        out_gate_bias=_randn(c_z, scale=0.2),
    )
    return z, mask, parameters


def _factors(z: Tensor, mask: Tensor, p: FactorParams, width: int) -> Tensor:
    """Factors ``[2 c, W, W]`` by PyTorch in float64, with zeros past the pair."""
    z, mask, *exact = (x.double() for x in (z, mask, *p))
    p = FactorParams(*exact)
    x = layer_norm(z, z.shape[-1:], p.norm_weight, p.norm_bias, EPS)
    y = (
        linear(x, p.proj_weight, p.proj_bias)
        * linear(x, p.gate_weight, p.gate_bias).sigmoid()
        * mask[..., None]
    )
    found = y.new_zeros(y.shape[-1], width, width)
    found[:, : z.shape[0], : z.shape[1]] = y.movedim(-1, 0)
    return found


@needs_tiles
@pytest.mark.parametrize(("n", "width"), [(5, 8), (21, 24), (70, 80)])
def test_factors_are_those_of_pytorch(n: int, width: int) -> None:
    """Also where a tile reaches past the pair, whose factors are zero there."""
    z, mask, p = _inputs(n)
    found = torch.full((256, width, width), torch.nan, dtype=z.dtype, device=z.device)
    triton_tiles.project_tiles(found, z, mask, p.factors, 0, 128)
    expected = _factors(z, mask, p.factors, width)
    assert relative_error(found, expected) < 4e-3
    assert not found[:, n:].any()
    assert not found[:, :, n:].any()


@needs_tiles
def test_factors_of_half_of_the_channels() -> None:
    z, mask, p = _inputs(9)
    found = torch.full((128, 16, 16), torch.nan, dtype=z.dtype, device=z.device)
    triton_tiles.project_tiles(found, z, mask, p.factors, 64, 64)
    left, right = _factors(z, mask, p.factors, 16).chunk(2)
    assert relative_error(found, torch.cat((left[64:], right[64:]))) < 4e-3


@needs_tiles
@pytest.mark.parametrize(("rows", "n", "width"), [(5, 5, 8), (3, 70, 72), (21, 21, 32)])
def test_updates_are_those_of_pytorch(rows: int, n: int, width: int) -> None:
    """With residual and dropout, without them, and in place."""
    z, _, parameters = _inputs(n)
    z, p = z[:rows].clone(), parameters.update
    product = 3 * _randn(128, width, width) + 1
    exact = UpdateParams(*(x.double() for x in p))
    y = product[:, :rows, :n].double().movedim(0, -1)
    y = layer_norm(y, (128,), exact.norm_out_weight, exact.norm_out_bias, EPS)
    x = layer_norm(z.double(), (128,), exact.norm_weight, exact.norm_bias, EPS)
    gate = linear(x, exact.out_gate_weight, exact.out_gate_bias).sigmoid()
    expected = z.double() + linear(y, exact.out_weight, exact.out_bias) * gate
    residual, changed = _randn(rows, n, 128), torch.empty_like(z)
    dropout = 2 * (torch.rand(rows, 1, 128) > 0.5).to(z).expand_as(z)
    update = expected - z.double()
    for given, factors in itertools.product((residual, z, None), (dropout, None)):
        triton_tiles.write_update_tiles(changed, product, z, p, given, factors)
        exact = update if factors is None else update * factors.double()
        assert relative_error(changed, exact if given is None else given.double() + exact) < 5e-3
    triton_tiles.write_update_tiles(z, product, z, p, z, None)
    assert relative_error(z, expected) < 4e-3


@needs_tiles
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("channels", [None, 128])
def test_the_operator_is_its_definition(outgoing: bool, channels: int | None) -> None:
    """By a plan with all channels, and in two groups."""
    z, mask, p = _inputs(20)
    named = {name: x.double() for name, x in zip(p._fields, p, strict=True)}
    expected = z.double() + reference.triangle_multiplication(
        z.double(), mask.double(), **named, outgoing=outgoing
    )
    options: dict[str, Any] = {"outgoing": outgoing, "backend": "triton", "plan": ContractionPlan(channels)}
    found = kernels.triangle_multiplication(z, mask, p, residual=z, out=torch.empty_like(z), **options)
    assert relative_error(found, expected) < 5e-3
    assert torch.equal(kernels.triangle_multiplication(z, mask, p, residual=z, out=z, **options), found)


@needs_tiles
def test_weights_are_folded_by_one_kernel() -> None:
    """Two weights, each with its norm, of rows from two places; the last program's rows are not all there."""
    torch.manual_seed(0)
    weights, biases = (_randn(60, 128), _randn(60, 128)), (_randn(60), _randn(60))
    norms = tuple((1 + _randn(128, scale=0.2).float(), _randn(128).float()) for _ in range(2))
    rows = torch.cat((torch.arange(5, 25), torch.arange(40, 58)))
    found, sums = triton_tiles.folded(weights, biases, norms, 38, (20, 5, 20))
    for i, (weight, bias, (scale, shift)) in enumerate(zip(weights, biases, norms, strict=True)):
        exact = weight[rows].float()
        scaled = (exact * scale).to(torch.bfloat16)
        assert torch.equal(found[38 * i : 38 * (i + 1)], scaled)
        torch.testing.assert_close(sums[i, 0], scaled.float().sum(1), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(sums[i, 1], bias[rows].float() + exact @ shift, rtol=1e-5, atol=1e-4)


def _launched(
    monkeypatch: pytest.MonkeyPatch, *, c: int = 128, dtype: Any = torch.bfloat16, **given: Any
) -> set[str]:
    """Names of the kernels that a call launches."""
    names: set[str] = set()

    def launcher(kernel: Any, grid: Any) -> Any:
        return lambda *arguments, **options: names.add(kernel.__name__)

    z, mask, p = _inputs(6, c, c)
    z, mask = z.to(dtype), mask.to(dtype)
    options = {"residual": z, "dropout": None, "plan": ContractionPlan(c)} | given
    with launches_replaced(launcher):
        kernels.triangle_multiplication(
            z, mask, p, outgoing=True, out=torch.empty_like(z), backend="triton", **options
        )
    return names


CODE = """
import json
from collections import Counter
from benchmarks.kernels import variants
from benchmarks.kernels.compilation import needs_of, no_gpu
from benchmarks.kernels.machine_code import listing

for variant in variants._tiles():
    if variant.name.startswith("fold"):
        continue
    with no_gpu(90):
        compiled = variant.kernel.run(*variant.arguments, grid=(1,), warmup=True, **variant.options)
    names = Counter(one.name.split(".")[0] for one in listing(compiled))
    needs = needs_of(compiled)
    print(json.dumps([variant.name.split()[0], names, needs.registers, needs.shared, needs.spills]))
"""


@pytest.mark.long
def test_hopper_copies_tiles_in_the_background_and_keeps_the_weights() -> None:
    """Machine code has Hopper's products, copies by descriptors alone, and no spills."""
    shared = {"triangle_project_tiles": 227 * 1024 // 2, "triangle_output_tiles": 227 * 1024}
    found = run_program(CODE)
    assert {name for name, *_ in found} == shared.keys()
    for name, instructions, registers, needed, spills in found:
        assert instructions["HGMMA"] >= 16
        assert instructions["UTMALDG"] >= 4
        assert instructions["UTMASTG"] >= 1
        assert not {"HMMA", "LDGSTS", "LDL", "STL", "STG"} & instructions.keys()
        assert (registers <= 255, spills) == (True, 0)
        assert needed <= shared[name]


FOLD = "fold_weights_kernel"
TILES = {FOLD, "triangle_project_tiles_kernel", "triangle_output_tiles_kernel"}
PLAIN = {"triangle_project_kernel", "triangle_output_kernel"}


@needs_tiles
def test_what_tiles_do_not_serve_keeps_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _launched(monkeypatch) == TILES
    assert _launched(monkeypatch, plan=ContractionPlan(32)) == {
        FOLD,
        "triangle_project_kernel",
        "triangle_output_tiles_kernel",
    }
    for given in ({"residual": None}, {"dropout": torch.ones(6, 6, 128, device=DEVICE)}):
        assert _launched(monkeypatch, **given) == TILES
    strided = {"residual": _randn(6, 6, 128).transpose(0, 1)}
    assert _launched(monkeypatch, **strided) == {
        FOLD,
        "triangle_project_tiles_kernel",
        "triangle_output_kernel",
    }
    assert _launched(monkeypatch, c=64) == PLAIN
    assert _launched(monkeypatch, dtype=torch.float32) == PLAIN
    monkeypatch.delenv(triton_tiles.VARIABLE)
    assert _launched(monkeypatch) == PLAIN
