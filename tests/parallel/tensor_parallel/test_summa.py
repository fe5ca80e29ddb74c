"""Matrix products on a square grid of ranks, each with one block of every matrix, equal those of whole matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.tensor_parallel.linear import SummaLinear
from tests.helpers.thread_ranks import on_a_grid

BATCH, INNER, IN, OUT = 5, 2, 7, 6


def _whole(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, INNER, IN), (OUT, IN), (BATCH, INNER, OUT))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("side", [1, 2, 3])
def test_blocks_of_product_and_gradients_are_those_of_the_whole(side: int) -> None:
    """Uneven blocks, with another axis between the batch and the features."""
    x, weight, grad = _whole(torch.float64)
    y = x @ weight.T
    x_grad, weight_grad = grad @ weight, torch.einsum("bno,bni->oi", grad, x)
    sizes = shard_sizes(IN, side)

    def run(column: Group, row: Group) -> list[float]:
        """This rank's place is (number in its column, number in its row)."""
        i, j = column.rank, row.rank
        batch, out = column.shard(BATCH), row.shard(OUT)
        own = x[batch, :, row.shard(IN)].clone().requires_grad_()
        # The block of the weight has the outputs of this rank's column, and the inputs of its row.
        block = weight[out, column.shard(IN)].clone().requires_grad_()
        assert sizes[j] == own.shape[-1]
        assert sizes[i] == block.shape[-1]
        found = SummaLinear.apply(own, block, sizes, row, column)
        found.backward(grad[batch, :, out])
        pairs = (
            (found, y[batch, :, out]),
            (own.grad, x_grad[batch, :, row.shard(IN)]),
            (block.grad, weight_grad[out, column.shard(IN)]),
        )
        return [float((a - b).detach().abs().max()) for a, b in pairs]  # type: ignore[operator]

    assert max(error for rank in on_a_grid((side, side), run) for error in rank) < 1e-12


def test_half_precision_is_added_up_in_float32_and_only_what_is_needed_is_sent() -> None:
    """Three products, each rounded as a product is, and their sum rounded once; the weight takes no gradient."""
    x, weight, _ = _whole(torch.bfloat16)
    sizes = shard_sizes(IN, 3)
    terms = [a @ b.T for a, b in zip(x.split(sizes, -1), weight.split(sizes, -1), strict=True)]
    exact = torch.stack([term.float() for term in terms]).sum(0).bfloat16()

    def run(column: Group, row: Group) -> tuple[bool, list[str]]:
        own = x[column.shard(BATCH), :, row.shard(IN)].clone().requires_grad_()
        found = SummaLinear.apply(own, weight[row.shard(OUT), column.shard(IN)], sizes, row, column)
        with row.reporter.record() as log, column.reporter.record() as other:
            found.float().sum().backward()
        same = torch.equal(found.detach(), exact[column.shard(BATCH), :, row.shard(OUT)])
        return same, [entry.op for entry in (*log.entries, *other.entries)]

    for same, sent in on_a_grid((3, 3), run):
        assert same
        assert sorted(sent) == ["broadcast"] * 3 + ["reduce"] * 3
