"""One kernel for the rows of gated attention computes what the separate kernels do, and serves what it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.recording import launches_replaced
from fastfold import kernels
from fastfold.kernels import GatedAttentionParams, reference
from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.ops.gated_attention import triton_rows
from tests.helpers.compiler import run_program
from tests.helpers.kernel_checks import DEVICE, relative_error

needs_rows = pytest.mark.skipif(
    not interpreted()
    and not (torch.cuda.is_available() and torch.cuda.get_device_capability() in triton_rows.CAPABILITIES),
    reason="needs Triton's interpreter, an A100 or a Hopper GPU",
)
KERNEL = "gated_attention_rows_kernel"


@pytest.fixture(autouse=True)
def requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked for."""
    monkeypatch.setenv(triton_rows.VARIABLE, "1")


def _randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape)).to(DEVICE, torch.bfloat16)


def _inputs(rows: int, length: int, channels: int = 128, heads: int = 4) -> dict[str, Any]:
    """Rows with means of their own, a bias, a mask that hides all keys of the first row, and parameters."""
    torch.manual_seed(rows + 100 * length)
    mask = (torch.rand(rows, length) > 0.2).to(DEVICE, torch.bfloat16)
    mask[:, 0], mask[0] = 1, 0
    width, norm = 32 * heads, 1 + _randn(channels, scale=0.2).float()
    weights = [_randn(width, channels, scale=channels**-0.5) for _ in range(4)]
    return {
        "x": _randn(rows, length, channels, scale=1.5) + _randn(rows, length, 1, scale=2.0),
        "bias": _randn(heads, length, length),
        "mask": mask,
        "parameters": GatedAttentionParams(
            *(norm, _randn(channels, scale=0.2).float(), *weights[:3]),
            *(weights[3], 1 + _randn(width, scale=0.5)),
            *(_randn(channels, width, scale=width**-0.5), _randn(channels, scale=0.2)),
        ),
    }


def _update(inputs: dict[str, Any], heads: int = 4) -> Tensor:
    """Update of the operator, without a residual that would hide its error."""
    return kernels.gated_attention(**inputs, heads=heads, out=torch.empty_like(inputs["x"]), backend="triton")


def _exact(inputs: dict[str, Any], heads: int = 4) -> Tensor:
    p = inputs["parameters"]
    named = {name: x.double() for name, x in zip(p._fields, p, strict=True)}
    x, bias, mask = (None if inputs[k] is None else inputs[k].double() for k in ("x", "bias", "mask"))
    return reference.gated_attention(x, bias, mask, heads=heads, **named)


@needs_rows
@pytest.mark.parametrize(
    ("rows", "length", "channels", "heads"), [(5, 9, 128, 4), (3, 70, 128, 4), (3, 16, 256, 8)]
)
def test_updates_are_those_of_the_definition(rows: int, length: int, channels: int, heads: int) -> None:
    """With more rows than programs, so that slots are used again; the rest of a block of keys is left out."""
    inputs = _inputs(rows, length, channels, heads)
    found = _update(inputs, heads)
    assert relative_error(found, _exact(inputs, heads)) < 5e-3
    for name in ("bias", "mask"):
        changed = _update(inputs | {name: None}, heads)
        assert relative_error(changed, _exact(inputs | {name: None}, heads)) < 5e-3
        assert relative_error(changed, found) > 0.05


@needs_rows
def test_columns_are_rows_of_a_transposed_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, with residual and dropout, as a layer asks for it; the separate kernels agree to a rounding."""
    inputs = _inputs(3, 10)
    x = inputs["x"].transpose(0, 1).contiguous().transpose(0, 1)
    dropout = 2 * (torch.rand(3, 1, 128) > 0.5).to(x)

    def updated() -> Tensor:
        own = x.clone()
        options: dict[str, Any] = {"heads": 4, "residual": own, "dropout": dropout, "out": own}
        return kernels.gated_attention(**inputs | {"x": own}, **options, backend="triton")

    found = updated()
    assert found.stride() == x.stride()
    monkeypatch.delenv(triton_rows.VARIABLE)
    separate = updated()
    assert relative_error(found, separate.double()) < 1e-3
    exact = x.double() + dropout.double() * _exact(inputs)
    assert relative_error(found, exact) < 3e-3


def _launched(inputs: dict[str, Any], heads: int = 4) -> Counter[str]:
    names: Counter[str] = Counter()

    def launcher(kernel: Any, grid: Any) -> Any:
        return lambda *arguments, **options: names.update([kernel.__name__])

    with launches_replaced(launcher):
        _update(inputs, heads)
    return names


@needs_rows
def test_other_inputs_keep_the_separate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(2, 6)
    separate = {
        "layer_norm_forward_kernel": 1,
        "attention_forward_kernel": 1,
        "residual_update_forward_kernel": 1,
    }
    assert _launched(inputs) == {KERNEL: 1, "residual_update_forward_kernel": 1}
    p = inputs["parameters"]
    exact = {
        "x": inputs["x"].float(),
        "bias": inputs["bias"].float(),
        "parameters": p._make(map(Tensor.float, p)),
    }
    for others in (
        inputs | exact,
        inputs | {"parameters": p._replace(gate_weight=None, gate_bias=None)},
        _inputs(2, triton_rows.MAX_LENGTH + 1),
        _inputs(2, 6, channels=64),
    ):
        assert _launched(others) == separate
    assert _launched(inputs | {"bias": None}, heads=8) == separate
    monkeypatch.delenv(triton_rows.VARIABLE)
    assert _launched(inputs) == separate


CODE = """
import json
from collections import Counter
from benchmarks.kernels import variants
from benchmarks.kernels.compilation import needs_of, no_gpu
from benchmarks.kernels.machine_code import listing

for variant in variants._attention_rows():
    (architecture,) = variant.architectures
    with no_gpu(architecture):
        compiled = variant.kernel.run(*variant.arguments, grid=(1,), warmup=True, **variant.options)
    names, needs = Counter(one.name.split(".")[0] for one in listing(compiled)), needs_of(compiled)
    print(json.dumps([architecture, variant.options["C"], names, needs.registers, needs.shared, needs.spills]))
"""


@pytest.mark.long
def test_machine_code_keeps_the_weights_and_shares_a_multiprocessor() -> None:
    """It uses the tensor cores, has no spills, and waits for the whole program twice a row."""
    found = run_program(CODE)
    assert [tuple(row[:2]) for row in found] == [(80, 128), (80, 256), (90, 128), (90, 256)]
    for architecture, channels, instructions, registers, shared, spills in found:
        assert instructions["HGMMA" if architecture == 90 else "HMMA"] >= 16
        assert instructions["BAR"] >= 2
        assert (registers <= 255, spills) == (True, 0)
        assert 4 * 32 * channels * 2 <= shared  # all weights of a head
        assert 2 * shared <= (227 if architecture == 90 else 2 * 163) * 1024
