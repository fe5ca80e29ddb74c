"""Operators are registered with a gradient that saves and computes only what is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold import kernels
from fastfold.kernels.common import operator
from fastfold.kernels.common.cost import OPERATOR_COSTS
from tests.helpers.kernel_checks import BACKENDS, DEVICE


class _Needs(TorchDispatchMode):
    """Records the flags of backward operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fastfold.residual_update_backward.default:
            self.found.append(list(args[5]))
        return func(*args, **(kwargs or {}))


def test_only_what_the_backward_pass_reads_is_saved_and_only_needed_gradients_are_asked_for() -> None:
    x, residual, gate = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2), torch.randn(3, 2)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = kernels.residual_update(x, residual, gate=gate)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), gate.data_ptr()}
    with _Needs() as needs:
        out.sum().backward()
    assert needs.found == [[True, False, False]]
    torch.testing.assert_close(x.grad, gate.sigmoid())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_is_saved_only_if_the_backward_pass_takes_it(backend: str) -> None:
    """Triton's backward pass of attention reads the result; PyTorch's computes it again."""
    saved: list[Tensor] = []
    q = torch.randn(1, 2, 3, 1, 8, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attended = kernels.attention(q, q, q, backend=backend)
    assert (attended.data_ptr() in {t.data_ptr() for t in saved}) == (backend == "triton")


def test_every_operator_has_a_cost() -> None:
    assert operator.OPERATOR_COSTS is OPERATOR_COSTS
    assert {
        f"{name}_backward" for name in ("transition", "pair_bias", "residual_update")
    } <= OPERATOR_COSTS.keys()
