"""Logits of pairs in rows: the same sums and gradients as of a whole tensor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.execution import ExecutionPolicy, LazyRows
from fastfold.evoformer.losses.masked import PairLogits, over_bins, pair_logits

N, BINS = 7, 5


@dataclass
class FirstRows:
    """Rows of the first of two processes; the second one's are given."""

    others: Tensor

    @property
    def own(self) -> slice:
        return slice(0, 4)

    def join(self, x: Tensor, dim: int = -2) -> Tensor:
        return torch.cat([x, self.others.to(x)], dim)


def entropy(logits: Tensor, weight: Tensor) -> Tensor:
    return weight * -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rows_of_block", [1, 3, 7])
def test_rows_reduce_to_what_a_tensor_does(rows_of_block: int, ordered: bool) -> None:
    x = torch.randn(N, N, BINS, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
    weight = torch.rand(N, N, dtype=torch.float64, generator=torch.manual_seed(1))
    order = torch.randperm(N, generator=torch.manual_seed(2)) if ordered else None
    calls: list[slice] = []

    def rows(index: slice) -> Tensor:
        calls.append(index)
        return x[index] * 2

    lazy = LazyRows(rows, (N, N, BINS), ExecutionPolicy(block_elements=rows_of_block * N * BINS))
    found = over_bins(entropy, pair_logits({"logits": lazy}, order), weight)
    wanted = over_bins(entropy, pair_logits({"logits": x * 2}, order), weight)
    torch.testing.assert_close(found, wanted)
    assert len(calls) == -(-N // rows_of_block)
    all_logits = pair_logits({"logits": lazy}, order)
    if isinstance(all_logits, PairLogits):
        torch.testing.assert_close(
            all_logits.whole(), x * 2 if order is None else 2 * x[order][:, order], rtol=0, atol=0
        )
    calls.clear()
    found = over_bins(entropy, pair_logits({"logits": lazy}, order), weight)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    assert len(calls) == 2 * -(-N // rows_of_block)  # the backward pass computes them once more


def test_rows_of_processes_are_joined() -> None:
    x = torch.randn(N, N, BINS, generator=torch.manual_seed(0))
    weight = torch.rand(N, N, generator=torch.manual_seed(1))
    wanted = over_bins(entropy, x, weight)
    shared = PairLogits(x[:4], FirstRows(wanted[4:]))
    torch.testing.assert_close(over_bins(entropy, shared, weight), wanted)
    assert torch.equal(PairLogits(x[:4], FirstRows(x[4:])).whole(), x)
