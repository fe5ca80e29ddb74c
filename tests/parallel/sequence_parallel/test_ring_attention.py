"""Keys and values that travel round a ring, and what stays where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold.parallel.comm.groups import Group
from fastfold.parallel.sequence_parallel import online_softmax
from fastfold.parallel.sequence_parallel.attention import Ring, RingAttention
from tests.helpers.thread_ranks import on_a_grid, on_one_line

SIZES = (2, 0, 3)
"""Keys of each rank; one has none."""
B, R, H, D = 1, 2, 2, 4


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_shard_passes_every_rank() -> None:
    def run(group: Group) -> tuple[list[int], list[tuple[int, list[float]]], list[tuple[int, int]]]:
        ring = Ring(group, SIZES, 1.0, None, None)
        own = torch.full((1, SIZES[group.rank], 1, 1), float(group.rank))
        passed = [(shard, x.flatten().tolist()) for shard, x in ring.travel(own)]
        return ring.order, passed, [(ring.keys(i).start, ring.keys(i).stop) for i in range(3)]

    for rank, (order, passed, keys) in enumerate(on_one_line(3, run)):
        assert order == [rank, (rank - 1) % 3, (rank - 2) % 3]
        assert passed == [(shard, [float(shard)] * SIZES[shard]) for shard in order]
        assert keys == [(0, 2), (2, 2), (2, 5)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", [1, 1 << 20], ids=["blocks", "one block"])
def test_a_ring_attends_as_one_rank_does(causal: bool, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias for all keys, masked keys, a row without any, in blocks of one query or whole; with all gradients."""
    monkeypatch.setattr(online_softmax, "_MAX_SCORES", scores)
    n, scale = sum(SIZES), 0.3
    q, k, v = (_normal(B, R, n, H, D, seed=i).requires_grad_() for i in range(3))
    bias, masked = _normal(B, H, n, n, seed=3).requires_grad_(), torch.zeros(B, R, n, dtype=torch.bool)
    masked[0, 0, 3], masked[0, 1] = True, not causal
    logits = scale * torch.einsum("brqhd,brkhd->brhqk", q, k) + bias[:, None]
    logits = logits.masked_fill(masked[:, :, None, None], -1e9)
    if causal:
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    exact = torch.einsum("brhqk,brkhd->brqhd", logits.softmax(-1), v)
    grad = _normal(*exact.shape, seed=4)
    expected = torch.autograd.grad(exact, (q, k, v, bias), grad)

    def run(group: Group) -> list[Tensor]:
        start = sum(SIZES[: group.rank])
        own = slice(start, start + SIZES[group.rank])
        leaves = [x[:, :, own].detach().requires_grad_() for x in (q, k, v)]
        of_bias = bias[:, :, own].detach().requires_grad_()
        ring = Ring(group, SIZES, scale, start if causal else None, None)
        found = RingAttention.apply(leaves[0], torch.stack(leaves[1:]), of_bias, masked, ring)
        grads = torch.autograd.grad(found, (*leaves, of_bias), grad[:, :, own])
        return [found.detach(), *grads]

    parts = list(zip(*on_one_line(3, run), strict=True))
    for mine, whole in zip(parts[:4], (exact, *expected[:3]), strict=True):
        torch.testing.assert_close(torch.cat(mine, 2), whole.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat(parts[4], 2), expected[3], rtol=1e-10, atol=1e-10)


def test_a_bias_that_is_cut_both_ways_is_fetched_shard_by_shard() -> None:
    """Rank (i, j) of a grid has the queries i, the keys j and the bias of both; its gradient comes back to it."""
    n, sizes = 5, (3, 2)
    cuts = (slice(0, 3), slice(3, 5))
    q, k, v = (_normal(B, R, n, H, D, seed=i) for i in range(3))
    bias = _normal(B, H, n, n, seed=3).requires_grad_()
    logits = torch.einsum("brqhd,brkhd->brhqk", q, k) + bias[:, None]
    exact = torch.einsum("brhqk,brkhd->brqhd", logits.softmax(-1), v)
    (expected,) = torch.autograd.grad(exact.sum(1).square().sum(), bias)
    weights = 2 * exact.detach().sum(1, keepdim=True)

    def run(rows: Group, columns: Group) -> tuple[float, float]:
        """The rows of the alignment are spread over the ranks that share queries: rank j has row j."""
        i, j = rows.rank, columns.rank
        own = bias[:, :, cuts[i], cuts[j]].detach().requires_grad_()
        ring = Ring(rows, sizes, 1.0, None, columns)
        mine = slice(j, j + 1)
        kv = torch.stack((k[:, mine, cuts[i]], v[:, mine, cuts[i]]))
        found = RingAttention.apply(q[:, mine, cuts[i]], kv, own, None, ring)
        (grad,) = torch.autograd.grad(found, own, weights[:, :, cuts[i]])
        of_out, of_bias = exact[:, mine, cuts[i]], expected[:, :, cuts[i], cuts[j]]
        return float((found - of_out).detach().abs().max()), float((grad - of_bias).detach().abs().max())

    assert max(error for rank in on_a_grid((2, 2), run) for error in rank) < 1e-10
