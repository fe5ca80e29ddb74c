"""The trial of Gluon computes triangle multiplication, and fits Hopper's registers and shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from benchmarks.gpu import gluon_tiles
from benchmarks.gpu.rivals import compare_halves, gluon
from benchmarks.gpu.timing import TOY
from benchmarks.kernels.recording import launches_replaced
from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.ops.triangle_multiplication.params import EPS, FactorParams, UpdateParams
from tests.helpers.compiler import run_program
from tests.helpers.gluon_threads import functions, launcher
from tests.helpers.kernel_checks import relative_error


@pytest.fixture(autouse=True)
def on_threads() -> Iterator[None]:
    """Launches run on the CPU."""
    with launches_replaced(launcher(gluon_tiles)):
        yield


def _randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape)).to(torch.bfloat16)


def _pair(rows: int, n: int) -> Tensor:
    """A pair whose rows have means of their own."""
    torch.manual_seed(rows * n)
    return _randn(rows, n, 128, scale=1.5) + _randn(rows, n, 1, scale=2.0)


def _norm() -> tuple[Tensor, Tensor]:
    return 1 + 0.2 * torch.randn(128), 0.2 * torch.randn(128)


@pytest.mark.parametrize(("rows", "n", "width"), [(21, 21, 24), (3, 70, 72)])
def test_factors_are_those_of_pytorch(rows: int, n: int, width: int) -> None:
    """Also past the pair, whose factors are zero there."""
    z, mask = _pair(rows, n), (torch.rand(n, rows) > 0.1).to(torch.bfloat16).T
    weights = [(_randn(256, 128, scale=128**-0.5), mean + _randn(256, scale=0.2)) for mean in (0.0, 1.0)]
    p = FactorParams(*_norm(), *weights[0], *weights[1])
    found = torch.full((256, width, width), torch.nan, dtype=z.dtype)
    gluon_tiles.project(found, z, mask, p)
    exact = FactorParams(*(x.double() for x in p))
    x = layer_norm(z.double(), (128,), exact.norm_weight, exact.norm_bias, EPS)
    gate = linear(x, exact.gate_weight, exact.gate_bias).sigmoid()
    factors = linear(x, exact.proj_weight, exact.proj_bias) * gate * mask[..., None]
    assert relative_error(found[:, :rows, :n], factors.movedim(-1, 0)) < 4e-3
    assert not found[:, rows:].any()
    assert not found[:, :, n:].any()


def test_the_instructions_of_the_gate_are_the_logistic_function() -> None:
    x = torch.linspace(-20, 20, 101)
    torch.testing.assert_close(functions(gluon_tiles)["logistic"](x), x.sigmoid(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("rows", "n", "width"), [(21, 21, 24), (3, 70, 72)])
def test_updates_are_those_of_pytorch_in_place(rows: int, n: int, width: int) -> None:
    z, product = _pair(rows, n), 3 * _randn(128, width, width) + 1
    weights = [(_randn(128, 128, scale=128**-0.5), _randn(128, scale=0.2)) for _ in range(2)]
    p = UpdateParams(*_norm(), *_norm(), *weights[0], *weights[1])
    exact = UpdateParams(*(x.double() for x in p))
    y = product[:, :rows, :n].double().movedim(0, -1)
    y = layer_norm(y, (128,), exact.norm_out_weight, exact.norm_out_bias, EPS)
    x = layer_norm(z.double(), (128,), exact.norm_weight, exact.norm_bias, EPS)
    gate = linear(x, exact.out_gate_weight, exact.out_gate_bias).sigmoid()
    expected = z.double() + linear(y, exact.out_weight, exact.out_bias) * gate
    gluon_tiles.write_update(z, product, z, p)
    assert relative_error(z, expected) < 4e-3


@pytest.mark.long
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter for the other kernels")
def test_both_halves_are_compared_and_timed() -> None:
    lines = list(compare_halves("cpu", TOY))
    variants = ("plain", "tiles", "gluon")
    assert [(line["residues"], line["half"], line["variant"]) for line in lines] == [
        (n, half, variant) for n in (9, 12) for half in ("projection", "output") for variant in variants
    ]
    for line in lines:
        assert (line["relative_error"] == 0) == (line["variant"] == "plain")
        assert line["device_ms"] > 0
    assert list(gluon("cpu", TOY)) == [{"skipped": "needs a Hopper GPU (compute capability 9.0)"}]


@pytest.mark.long
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter for the other kernels")
def test_a_wrong_half_is_an_error_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gluon_tiles.project

    def wrong(factors: Tensor, z: Tensor, mask: Tensor, weights: FactorParams) -> None:
        right(factors, z, mask.roll(1, 0), weights)

    monkeypatch.setattr(gluon_tiles, "project", wrong)
    line = next(line for line in compare_halves("cpu", TOY) if "error" in line)
    assert (line["half"], line["variant"]) == ("projection", "gluon")
    assert "device_ms" not in line


CODE = """
import functools, json
import torch
from benchmarks.gpu import gluon_tiles
from benchmarks.kernels import variants
from benchmarks.kernels.compilation import needs_of, no_gpu

new = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
z, mask = new(16, 16, 128), new(16, 16)
with variants._recorded_launches() as launches:
    gluon_tiles.project(new(256, 16, 16), z, mask, variants._factor_parameters(new, 128))
    gluon_tiles.write_update(z, new(128, 16, 16), z, variants._update_parameters(new, 128))
for kernel, arguments, options in launches:
    with no_gpu(90):
        compiled = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    needs, text = needs_of(compiled), compiled.asm["ptx"]
    counts = [text.count(one) for one in ("wgmma.mma_async", "bulk.tensor", "setmaxnreg.inc")]
    print(json.dumps([kernel.__name__, needs.registers, needs.shared, needs.spills, *counts]))
"""


@pytest.mark.long
def test_partitions_fit_hopper_without_spills() -> None:
    """Machine code has asynchronous products, copies by descriptors, and registers for each partition."""
    found = run_program(CODE)
    assert [name for name, *_ in found] == ["triangle_project_gluon_kernel", "triangle_output_gluon_kernel"]
    for _, registers, shared, spills, products, copies, shares in found:
        assert (registers, spills) == (168, 0)  # 12 warps of 65,536 registers
        assert shared <= 227 * 1024
        assert products >= 16
        assert copies >= 4
        assert shares >= 2
