"""Gated attention in two parts is gated attention: results, gradients and cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastfold.kernels.common.cost import OPERATOR_COSTS
from fastfold.kernels.ops.gated_attention import eager, triton_launch
from fastfold.kernels.ops.gated_attention.op import gated_attention_begin, gated_attention_flops
from fastfold.kernels.ops.gated_attention.passes import gradients_of_parameters, row_blocks
from tests.helpers.kernel_checks import BACKENDS
from tests.helpers.named_operators import gated_attention
from tests.kernels.ops.test_gated_attention import NAMES, on_device, operands


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("leave_out", [(), ("bias", "gate_weight", "gate_bias")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_begun_goes_on_to_the_same_result_and_gradients(
    backend: str,
    leave_out: tuple[str, ...],
    batch: tuple[int, ...],
    dtype: torch.dtype,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the first of several blocks of rows; bit for bit, because the same is computed in the same order.

    With one thread: of several, each makes blocks of its own, and all make together what is begun.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    monkeypatch.setattr(eager, "row_step", lambda x: 2)
    monkeypatch.setattr(triton_launch, "row_step", lambda x: 2)
    made = on_device(operands(3, 5, batch, leave_out), dtype)
    x, bias, mask = (made.pop(name) for name in ("x", "bias", "mask"))
    parameters = eager.GatedAttentionParams(**made)
    dropout, grad = torch.rand_like(x), torch.randn_like(x)
    options: dict[str, Any] = {"heads": 2, "backend": backend}
    found = []
    for begins in (False, True):
        forward, backward = (
            gated_attention_begin(x, parameters, **options, backward=direction) if begins else []
            for direction in (False, True)
        )
        assert len(forward) == begins
        if begins:
            with FakeTensorMode() as mode:
                fake = [mode.from_tensor(t) for t in (x, *parameters.present())]
                said = torch.ops.fastfold.gated_attention_begin(fake[0], fake[1:], **options, backward=True)
            assert [(y.shape, y.dtype) for y in said] == [(y.shape, y.dtype) for y in backward]
        out = torch.ops.fastfold.gated_attention_begun(
            x, forward, bias, mask, dropout, parameters.present(), **options
        )
        grads = torch.ops.fastfold.gated_attention_backward(
            *(grad, x, backward, bias, mask, dropout, parameters.present()),
            needs=[True, bias is not None, True],
            add_x=True,
            **options,
        )
        found.append([out, *grads])
    whole = gated_attention(x, bias, mask, **made, heads=2, residual=x, dropout=dropout, backend=backend)
    assert torch.equal(found[0][0], whole)
    assert len(found[0]) > 6
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_begins_without_rows(backend: str) -> None:
    made = on_device(operands(3, 5))
    x, parameters = made["x"][:0], eager.GatedAttentionParams(*(made[name] for name in NAMES))
    assert gated_attention_begin(x, parameters, heads=2, backend=backend) == []
    assert gated_attention_begin(x, parameters, heads=2, backend=backend, backward=True) == []


@pytest.mark.parametrize("leave_out", [(), ("gate_weight", "gate_bias")], ids=["gate", "no gate"])
def test_gradients_behind_those_of_x_and_bias_are_those_of_the_parameters(leave_out: tuple[str, ...]) -> None:
    made = on_device(operands(3, 5, leave_out=leave_out))
    leaves = {name: made[name].requires_grad_() for name in NAMES if made[name] is not None}
    out = gated_attention(**made, heads=2, backend="torch")
    grad = torch.randn_like(out)
    expected = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))
    parameters = eager.GatedAttentionParams(*(made[name] for name in NAMES)).present()
    _, *found = torch.ops.fastfold.gated_attention_backward(
        *(grad, made["x"], [], made["bias"], made["mask"], None, parameters),
        heads=2,
        needs=[True, False, True],
        add_x=False,
        backend="torch",
    )
    for name, gradient in zip(leaves, gradients_of_parameters(found, parameters), strict=True):
        assert torch.equal(gradient, expected[name])


@pytest.mark.parametrize(("rows", "blocks"), [(4, 1), (5, 2), (9, 3), (0, 0)])
def test_blocks_have_every_row_of_every_element_once(rows: int, blocks: int) -> None:
    seen = torch.zeros(2, 3, rows, 7, 1)
    found = list(row_blocks(seen, lambda x: 4))
    for element, index in found:
        assert index[:2] == element
        seen[index] += 1
    assert len(found) == 6 * blocks
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.parametrize("leave_out", [(), ("gate_weight", "gate_bias")], ids=["gate", "no gate"])
def test_both_parts_cost_what_the_whole_does(
    leave_out: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has begun, two rows of three, is not counted again; without a beginning all of it is counted."""
    monkeypatch.setattr(eager, "row_step", lambda x: 2)
    made = on_device(operands(3, 5, leave_out=leave_out))
    parameters = eager.GatedAttentionParams(*(made[name] for name in NAMES))
    call = made | {"backend": "torch", "heads": 2, "parameters": parameters.present(), "needs": [True] * 3}
    whole, begin = (OPERATOR_COSTS[name](call) for name in ("gated_attention", "gated_attention_begin"))
    begun = gated_attention_begin(made["x"], parameters, heads=2, backend="torch")
    assert begin.flops == gated_attention_flops(2, 5, 24, 32, gated=not leave_out)[0]
    rest, nothing_begun = (
        OPERATOR_COSTS["gated_attention_begun"](call | {"projections": given}) for given in (begun, [])
    )
    assert begin.flops + rest.flops == whole.flops
    assert begin.launches + rest.launches == whole.launches
    assert nothing_begun == whole
    begun = gated_attention_begin(made["x"], parameters, heads=2, backend="torch", backward=True)
    backward = [
        OPERATOR_COSTS["gated_attention_backward"](call | {"out": given}).flops for given in ([], begun)
    ]
    assert backward[0] - backward[1] == begin.flops
