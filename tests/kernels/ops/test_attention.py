"""Attention on both backends equals its definition, whatever the sizes, strides, masks and dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.kernels.recording import launches_replaced
from benchmarks.kernels.variants import all_variants
from fastfold.errors import InputError
from fastfold.kernels import attention, reference
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.ops.attention import eager, triton_bwd
from fastfold.kernels.ops.attention.triton_bwd import BackwardOperands, Gradients, attend_backward_triton
from fastfold.kernels.ops.attention.triton_fwd import attend_triton, triton_operands
from tests.helpers.kernel_checks import (
    BACKENDS,
    DEVICE,
    DTYPES,
    TOLERANCES,
    check_against_definition,
    output_and_gradients,
    relative_error,
)

MASK = frozenset({"mask"})


def operands(
    rows: int,
    queries: int,
    keys: int,
    heads: int = 2,
    channels: int = 8,
    batch: tuple[int, ...] = (),
    leave_out: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Random arguments in float64; the first row has no keys at all."""
    generator = torch.Generator().manual_seed(queries + 100 * keys + channels)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

    mask = (torch.rand(*batch, rows, keys, generator=generator) > 0.3).double()
    mask[..., 1:, 0] = 1
    mask[..., 0, :] = 0
    made = {
        "q": normal(rows, queries, heads, channels),
        "k": normal(rows, keys, heads, channels),
        "v": normal(rows, keys, heads, channels),
        "bias": normal(heads, queries, keys),
        "mask": mask,
        "gate": normal(rows, queries, heads, channels),
    }
    return {name: x for name, x in made.items() if name not in leave_out}


def on_device(inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {name: x.to(DEVICE, dtype) for name, x in inputs.items()}


def check(backend: str, inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    def run(**arguments: Tensor) -> Tensor:
        return attention(**arguments, backend=backend)

    check_against_definition(run, reference.attention, inputs, dtype, MASK)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "queries", "keys"), [(2, 1, 1), (3, 17, 17), (2, 1, 37), (2, 37, 1), (2, 33, 65)]
)
def test_output_and_gradients_for_every_dtype(
    backend: str, dtype: torch.dtype, rows: int, queries: int, keys: int
) -> None:
    check(backend, operands(rows, queries, keys), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_thousand_positions(backend: str) -> None:
    check(backend, operands(1, 1000, 1000, heads=1, leave_out=("mask",)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_several_blocks(backend: str) -> None:
    """Four of them; of two and three, in every dtype, are those above."""
    check(backend, operands(2, 97, 97, heads=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [1, 8, 20, 32, 64, 128])
def test_channels_of_a_head_need_not_be_a_power_of_two(backend: str, channels: int) -> None:
    check(backend, operands(2, 9, 18, channels=channels))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "leave_out",
    [
        ("bias",),
        ("mask",),
        ("gate",),
        ("bias", "mask"),
        ("bias", "gate"),
        ("mask", "gate"),
        ("bias", "mask", "gate"),
    ],
    ids="-".join,
)
def test_bias_mask_and_gate_are_optional(backend: str, leave_out: tuple[str, ...]) -> None:
    check(backend, operands(2, 17, 18, leave_out=leave_out))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_leading_axes(backend: str) -> None:
    check(backend, operands(2, 5, 6, heads=1, batch=(2, 3)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", [(-4, -3), (-3, -2)], ids=["rows", "heads"])
def test_strides_do_not_matter(backend: str, axes: tuple[int, int]) -> None:
    """Rows and columns transposed, as around the ending node, and heads outside."""
    inputs = on_device(operands(2, 5, 5, batch=(2,)))
    strided = {
        name: x.transpose(*axes).contiguous().transpose(*axes) for name, x in inputs.items() if x.dim() > 4
    }
    strided["bias"] = inputs["bias"].mT.contiguous().mT
    strided["mask"] = inputs["mask"].mT.contiguous().mT
    assert not any(x.is_contiguous() for x in strided.values())
    plain = output_and_gradients(lambda **x: attention(**x, backend=backend), inputs, MASK)
    found = output_and_gradients(lambda **x: attention(**x, backend=backend), strided, MASK)
    for name, value in plain.items():
        assert relative_error(found[name], value) < 1e-6, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_may_be_one_for_all_heads(backend: str) -> None:
    """An expanded head (stride 0) is read as it lies."""
    inputs = on_device(operands(2, 5, 6, heads=3, leave_out=("bias",)))
    for name in ("k", "v"):
        inputs[name] = inputs[name][:, :, :1].expand(-1, -1, 3, -1)
    found = attention(**inputs, backend=backend)
    exact = reference.attention(**{name: x.double() for name, x in inputs.items()})
    assert relative_error(found, exact) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_keys_gives_the_mean_of_its_values_and_no_other_gradient(backend: str) -> None:
    inputs = on_device(operands(2, 5, 70, leave_out=("gate",)))
    inputs["q"][0] *= 1e3  # whatever the scores
    found = output_and_gradients(lambda **x: attention(**x, backend=backend), inputs, MASK)
    torch.testing.assert_close(found["output"][0], inputs["v"][0].mean(0).expand(5, -1, -1))
    assert not found["q"][0].any()
    assert not found["k"][0].any()
    assert found["v"][0].all()
    assert torch.isfinite(found["bias"]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_key_neither_gives_nor_receives(backend: str) -> None:
    """Its values and scores may be anything finite, and its gradients are exactly zero."""
    inputs = on_device(operands(3, 17, 37, heads=1))
    changed = {name: x.clone() for name, x in inputs.items()}
    masked = (inputs["mask"] == 0) & inputs["mask"].any(-1, keepdim=True)
    changed["k"][masked] = 100.0
    changed["v"][masked] = -1e4
    results = [
        output_and_gradients(lambda **x: attention(**x, backend=backend), x, MASK) for x in (inputs, changed)
    ]
    for name in ("k", "v"):
        assert not results[1][name][masked].any()
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # Triton's interpreter is NumPy's
def test_a_query_needs_a_key_whose_bias_is_not_too_low(backend: str) -> None:
    """A bias of -1e9 leaves one key out; on all keys it drowns a query's scores, and -inf leaves no numbers."""
    inputs = on_device(operands(2, 5, 6, leave_out=("mask", "gate")))
    inputs["bias"][..., 1] = -1e9
    inputs["bias"][:, 0] = -1e9
    kept = [0, 2, 3, 4, 5]
    fewer = (
        inputs | {name: inputs[name][:, kept] for name in ("k", "v")} | {"bias": inputs["bias"][..., kept]}
    )
    found, exact = (attention(**x, backend=backend) for x in (inputs, fewer))
    torch.testing.assert_close(found[:, 1:], exact[:, 1:])
    torch.testing.assert_close(found[:, 0], inputs["v"].mean(1))
    inputs["bias"][:, 0] = -torch.inf
    results = output_and_gradients(lambda **x: attention(**x, backend=backend), inputs, MASK)
    assert torch.isfinite(results["output"][:, 1:]).all()
    assert results["q"][:, 0].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bias", "mask", "gate"])
def test_leaving_out_an_argument_shows(backend: str, name: str) -> None:
    inputs = operands(3, 17, 17)
    changed = attention(**on_device({k: x for k, x in inputs.items() if k != name}), backend=backend)
    assert relative_error(changed, reference.attention(**inputs)) > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_the_same_in_every_run(backend: str) -> None:
    inputs = on_device(operands(3, 33, 34, heads=1))
    first, second = (
        output_and_gradients(lambda **x: attention(**x, backend=backend), inputs, MASK) for _ in range(2)
    )
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_the_backends_agree_where_rows_are_summed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with many processors the gradient of a small bias is summed in groups of rows, the last one shorter."""
    backward = pytest.importorskip("fastfold.kernels.ops.attention.triton_bwd")
    monkeypatch.setattr(backward, "row_groups", lambda blocks, device: 3)
    check("triton", operands(5, 17, 18, heads=1, batch=(2,)))


@pytest.mark.parametrize("spread", ["rows", "positions"])
def test_offsets_may_pass_two_to_the_31(spread: str, tmp_path: Path) -> None:
    """The last rows, or the last queries and keys, lie more than 2³¹ elements behind the first, in a sparse file."""
    if DEVICE.type != "cpu":
        pytest.skip("strides of this size are of a sparse file on the CPU")
    inputs = on_device(operands(3, 5, 5, heads=1, batch=(1,), leave_out=("gate",)), torch.float16)
    far = {}
    for name, x in inputs.items():
        array = np.memmap(tmp_path / name, np.float16, "w+", shape=(2**31 + 2**12,))
        axis = {"rows": 1, "positions": 2}[spread]
        strides = [x.stride(i) for i in range(x.dim())]
        strides[axis] = -(-(2**31) // (x.shape[axis] - 1)) if x.shape[axis] > 1 else strides[axis]
        far[name] = torch.from_numpy(array).as_strided(x.shape, strides).copy_(x)
    plain, found = (
        output_and_gradients(lambda **x: attention(**x, backend="triton"), x, MASK) for x in (inputs, far)
    )
    for name, value in plain.items():
        assert torch.equal(found[name], value), name


def test_float32_means_float32_unless_pytorch_is_told_otherwise() -> None:
    arithmetic = pytest.importorskip("fastfold.kernels.common.triton_math")
    assert arithmetic.precision(torch.zeros(1)) == "ieee"
    try:
        torch.set_float32_matmul_precision("high")
        assert arithmetic.precision(torch.zeros(1)) == "tf32"
        assert arithmetic.precision(torch.zeros(1, dtype=torch.bfloat16)) == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_bias_is_copied_where_rows_do_not_fill_pieces_of_16_keys() -> None:
    forward = pytest.importorskip("fastfold.kernels.ops.attention.triton_fwd")
    bias = torch.randn(2, 32, 32)
    assert forward.aligned(bias) is bias
    for strange in (bias.mT, bias[..., :31], bias[..., 1:17], torch.randn(2, 5, 37)):
        found = forward.aligned(strange)
        assert torch.equal(found, strange)
        assert found.stride(-1) == 1
        assert found.stride(-2) % 16 == 0
    hidden = forward.hidden_keys(torch.tensor([[1.0, 0.0, 1.0]]), torch.bfloat16)
    assert hidden.tolist() == [[0.0, -torch.inf, 0.0]]
    assert hidden.stride(0) == 16


def test_heads_too_wide_for_a_program_are_left_to_pytorch() -> None:
    check("triton", operands(2, 3, 4, heads=1, channels=160))


@pytest.mark.long
def test_the_table_has_a_configuration_for_everything_that_can_be_asked_for() -> None:
    """Every kernel, dtype and width of a head has one on every class of chips, and a variant of it."""
    forward = pytest.importorskip("fastfold.kernels.ops.attention.triton_fwd")
    names = {x.name for x in all_variants()}
    for kernel in ("forward", "ungate", "grad_q", "grad_kv", "grad_bias"):
        for channels in (8, 16, 32, 64, 128):
            for dtype, triton_type in {
                torch.float32: "fp32",
                torch.bfloat16: "bf16",
                torch.float16: "fp16",
            }.items():
                for queries in (1, 1000):
                    q = torch.empty(1, 1, queries, 1, channels, dtype=dtype)
                    assert forward.config(f"attention_{kernel}", q).blocks["BQ"] >= 16
                assert any(x.startswith(f"attention_{kernel} {triton_type} D={channels} ") for x in names)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["triton", pytest.param("torch", marks=pytest.mark.slow)])
def test_operator_check_of_pytorch(backend: str) -> None:
    inputs = on_device(operands(2, 5, 7, heads=1, batch=(1,)))
    leaves = [x.requires_grad_(name not in MASK) for name, x in inputs.items()]
    options = {"scale": 0.3, "backend": backend}
    torch.library.opcheck(torch.ops.fastfold.attention.default, (leaves[:3], *leaves[3:]), options)
    rest = [None if name in ("bias", "mask", "gate") else x for name, x in inputs.items()]
    torch.library.opcheck(torch.ops.fastfold.attention.default, (rest[:3], *rest[3:]), options)


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_compiles_as_one_graph(backend: str | None) -> None:
    inputs = on_device(operands(2, 5, 7, heads=1))
    compiled = torch.compile(
        lambda **x: attention(**x, backend=backend).sin(), fullgraph=True, backend="aot_eager"
    )
    plain = output_and_gradients(lambda **x: attention(**x, backend=backend).sin(), inputs, MASK)
    for name, value in output_and_gradients(compiled, inputs, MASK).items():
        torch.testing.assert_close(value, plain[name], msg=name)


@pytest.mark.parametrize("name", ["k", "v", "bias", "mask", "gate"])
def test_shapes_that_do_not_belong_together_are_refused(name: str) -> None:
    inputs = operands(2, 5, 7)
    inputs[name] = inputs[name][..., :-1]
    with pytest.raises(InputError, match=r"attention: expected .* for q"):
        attention(**inputs)


def test_dtypes_that_do_not_belong_together_are_refused() -> None:
    inputs = operands(2, 5, 7)
    inputs["k"] = inputs["k"].float()
    with pytest.raises(InputError, match="one dtype"):
        attention(**inputs)


def _exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, gate: Tensor) -> Tensor:
    """Attention of ``[R, N, H, D]`` in so many words; a row without keys is the mean of its values."""
    logits = torch.einsum("rqhd,rkhd->rhqk", q, k) / 3 + bias
    seen = logits.masked_fill(mask[:, None, None, :] == 0, -1e9)
    return torch.einsum("rhqk,rkhd->rqhd", seen.softmax(-1), v) * gate.sigmoid()


@pytest.mark.parametrize("elements", [16, 1 << 20], ids=["blocks", "one block"])
def test_blocks_of_rows_and_queries_make_one_result(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's passes in float64: one row and a few queries at a time, or everything at once."""
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", elements)
    made = operands(3, 5, 4)
    assert (eager.row_step(made["q"], made["k"], elements // 4) == 1) == (elements == 16)
    bias, masked = eager.prepare(made["bias"].requires_grad_(), made["mask"], torch.float64)
    assert bias is not None
    assert not bias.requires_grad
    read = eager.Operands(made["q"], made["k"], made["v"], bias, masked, made["gate"])
    out = torch.full_like(made["q"], torch.nan)
    eager.attend(out, read, 1 / 3, Scratch(dtype=torch.float64))
    leaves = {name: x.detach().requires_grad_(name != "mask") for name, x in made.items()}
    exact = _exact(**leaves)
    assert relative_error(out, exact) < 1e-12
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = torch.autograd.grad(exact, [leaves[name] for name in ("q", "k", "v", "bias", "gate")], grad)
    q, k, v, gate = (torch.full_like(made[name], torch.nan) for name in ("q", "k", "v", "gate"))
    grads = eager.Operands(q, k, v, torch.ones_like(bias), None, gate)
    again = torch.empty_like(out)
    eager.attend_backward(grad, read, grads, 1 / 3, Scratch(dtype=torch.float64), again)
    assert relative_error(again, exact) < 1e-12
    for mine, theirs in zip((q, k, v, grads.bias, gate), expected, strict=True):
        assert mine is not None
        # What is there of the bias's is added to.
        assert relative_error(mine - 1 if mine is grads.bias else mine, theirs) < 1e-12


def test_a_mask_that_hides_nothing_is_none() -> None:
    assert eager.prepare(None, torch.ones(2, 3), torch.float32) == (None, None)
    _, masked = eager.prepare(None, torch.tensor([[1.0, 0.0]]), torch.float32)
    assert masked is not None
    assert masked.tolist() == [[False, True]]
    one = eager.Operands(*(torch.arange(6.0).view(2, 3) + i for i in range(4)), None, None).batch((1,))
    assert one.q.tolist() == [3.0, 4.0, 5.0]
    assert one.bias is not None
    assert one.bias.tolist() == [6.0, 7.0, 8.0]
    assert (one.masked, one.gate) == (None, None)


def test_the_gradient_of_a_bias_is_the_sum_of_parts_of_its_rows() -> None:
    """Two groups of three rows, as a GPU with many processors and few blocks has them; each part stands alone."""
    made = operands(3, 5, 4) | {"gate": torch.full((3, 5, 2, 8), 1e3, dtype=torch.float64)}  # an open gate
    rows, queries, heads, channels = made["q"].shape
    grad = torch.randn(made["q"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaf = made["bias"].requires_grad_()
    parts = []
    for chosen in (slice(0, 2), slice(2, 3)):
        part = {name: x if name == "bias" else x[chosen] for name, x in made.items()}
        parts.append(torch.autograd.grad(_exact(**part), leaf, grad[chosen])[0])
    small = {name: x.detach().float()[None].to(DEVICE) for name, x in made.items()}
    read = triton_operands(small["q"], small["k"], small["v"], small["bias"], small["mask"], None)
    out = torch.empty_like(small["q"])
    lse = attend_triton(out, read, 1 / 3)
    grad_out = grad.float()[None].to(DEVICE)
    delta = (out * grad_out).sum(-1).permute(0, 3, 1, 2).contiguous()
    of = read.strides
    found = torch.full((2, 1, heads, queries, 4), torch.nan, device=DEVICE)
    triton_bwd.attention_grad_bias_kernel[(2 * heads,)](
        *(
            BackwardOperands(read.q, read.k, read.v, read.bias, read.hidden, grad_out, lse, delta),
            found,
            1 / 3,
        ),
        *(heads, rows, queries, 4, 2),
        BackwardOperands(of.q, of.k, of.v, of.bias, of.hidden, grad_out.stride()[:4]),
        D=channels,
        BD=16,
        BQ=16,
        BK=16,
        HAS_MASK=True,
        PRECISION="ieee",
    )
    for mine, theirs in zip(found, parts, strict=True):
        assert relative_error(mine[0], theirs) < 2e-6


def test_kernels_get_a_pointer_for_each_missing_operand() -> None:
    """A function of Triton 3.6 cannot return None, and kernels pass their operands through functions."""
    launched: list[str] = []

    def launcher(kernel: Any, grid: Any) -> Any:
        def launch(x: Any, *arguments: Any, **options: Any) -> None:
            if isinstance(x, tuple):
                launched.append(kernel.__name__)
                assert all(pointer is not None for pointer in x)

        return launch

    q = torch.empty(1, 3, 5, 2, 8, device="meta")
    read = triton_operands(q, q, q, None, None, None)
    with launches_replaced(launcher):
        lse = attend_triton(torch.empty_like(q), read, 1.0)
        attend_backward_triton(q, read, q, lse, Gradients(q, q, q, None), 1.0, need_bias=True)
    assert launched == ["attention_forward_kernel", "attention_grad_q_kernel", "attention_grad_kv_kernel"]


@pytest.mark.parametrize("elements", [16, 1 << 20], ids=["blocks", "one block"])
def test_projections_split_by_head_give_the_same_result(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", elements)
    made, scratch = operands(3, 5, 5), Scratch(dtype=torch.float64)
    bias, masked = eager.prepare(made["bias"], made["mask"], torch.float64)
    found, expected = torch.full((2, *made["q"].shape), torch.nan, dtype=torch.float64)
    whole = eager.Operands(made["q"], made["k"], made["v"], bias, masked, made["gate"])
    eager.attend(expected, whole, 1 / 3, Scratch(dtype=torch.float64))
    projected = torch.stack([made[name] for name in ("q", "k", "v", "gate")], 2)
    kept = projected.clone()
    q, k, v, gate = eager.split_by_head(projected, scratch)
    assert all(x[:, 0].stride()[1:] == (8, 1) for x in (q, k, v, gate.transpose(1, 2)))
    split = eager.Operands(q, k, v, bias, masked, gate)
    eager.attend(found, split, 1 / 3, scratch, by_head=True)
    # Products of some processors sum in an order that depends on strides.
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(projected, kept)
