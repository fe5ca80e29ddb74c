"""Causal attention over ranks: full attention's numbers, the same work on every rank, and half of the bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.sequence_parallel import online_softmax
from fastfold.parallel.sequence_parallel.attention import ring_attention
from fastfold.parallel.sequence_parallel.causal_ring import CausalRing
from fastfold.parallel.sequence_parallel.online_softmax import SoftmaxSum
from tests.helpers.drop_reductions import undetected_reductions
from tests.helpers.spawn_ranks import launch
from tests.helpers.thread_ranks import on_one_line

B, R, H, D = 1, 2, 3, 8
SHIFTS = ("start_shift",)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Whole:
    """Sequences of ``n`` positions, and PyTorch's full attention with its gradients."""

    def __init__(self, n: int, *, has_mask: bool = False) -> None:
        self.leaves = [_normal(B, R, n, H, D, seed=seed).requires_grad_() for seed in range(3)]
        self.grad = _normal(B, R, n, H, D, seed=3)
        self.mask = None
        is_seen = torch.ones(n, n, dtype=torch.bool).tril().expand(B, R, 1, n, n)
        if has_mask:
            self.mask = (_normal(B, R, n, seed=4) > -0.5).double()
            self.mask[..., 0] = 1  # every query sees a key
            is_seen = is_seen & (self.mask != 0)[:, :, None, None]
        q, k, v = (x.transpose(-3, -2) for x in self.leaves)
        self.out = scaled_dot_product_attention(q, k, v, attn_mask=is_seen).transpose(-3, -2)
        self.gradients = torch.autograd.grad(self.out, self.leaves, self.grad)

    def differs(self, group: Group, sizes: Sequence[int]) -> float:
        """Return the largest difference of this rank's output and gradients."""
        start = sum(sizes[: group.rank])
        own = slice(start, start + sizes[group.rank])
        q, k, v = (x.detach()[:, :, own].requires_grad_() for x in self.leaves)
        mask = None if self.mask is None else self.mask[..., own]
        out = ring_attention(q, k, v, mask=mask, group=group, sizes=sizes, causal=True)
        gradients = torch.autograd.grad(out, (q, k, v), self.grad[:, :, own])
        pairs = zip((out.detach(), *gradients), (self.out.detach(), *self.gradients), strict=True)
        differences = [(a - b[:, :, own]).abs().nan_to_num(torch.inf) for a, b in pairs]
        return max(float(x.max()) if x.numel() else 0.0 for x in differences)


@pytest.mark.parametrize("scores", [1, 1 << 20], ids=["blocks", "one block"])
@pytest.mark.parametrize(
    "sizes",
    [(4, 4), (5, 2), (0, 3), (3, 3, 3), (2, 0, 5), (2, 2, 2, 2), (1, 4, 0, 2), (2, 1, 3, 1, 2), (1,) * 6],
)
@pytest.mark.parametrize("has_mask", [False, True])
def test_results_and_gradients_are_those_of_full_attention(
    sizes: tuple[int, ...], scores: int, has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online_softmax, "_MAX_SCORES", scores)
    whole = Whole(sum(sizes), has_mask=has_mask)
    for difference in on_one_line(len(sizes), lambda group: whole.differs(group, sizes)):
        assert difference < 1e-12


@pytest.mark.parametrize("sizes", [(3, 3), (0, 3, 2), (2, 0, 5, 1), (1, 2, 3, 4, 5), (4,) * 8])
def test_every_query_meets_every_earlier_shard_once(sizes: tuple[int, ...]) -> None:
    """On its own rank or on that of the keys, and never both."""

    def run(group: Group) -> None:
        rank, ring = group.rank, CausalRing(group, sizes, 1.0)
        for distance in range(1, rank + 1):
            helped, own = ring.helped(rank, distance), ring.own_queries(rank, distance)
            together = [*range(helped), *range(own.start, own.stop)]
            assert together == list(range(sizes[rank])) or sizes[rank - distance] == 0
        for distance in range(rank + 1, len(sizes)):
            assert ring.helped(rank, distance) == 0
            assert not ring.gets_keys(rank, distance)

    on_one_line(len(sizes), run)


def _over_processes() -> tuple[float, int, list[str]]:
    group = Group(dist.group.WORLD, "everyone")
    whole, sizes = Whole(16), shard_sizes(16, group.size)
    return whole.differs(group, sizes), *undetected_reductions(
        lambda: whole.differs(group, sizes), names=SHIFTS
    )


@pytest.mark.parametrize("size", [2, 4])
def test_every_message_is_needed(size: int) -> None:
    """On processes: forward and backward, keys below half the ranks and queries above, at half of them both."""
    ranks = launch(_over_processes, size)
    assert all(difference < 1e-12 for difference, _, _ in ranks)
    of_keys, of_queries = 1 + 2, 2 + 2  # there, and there and back; queries and sums, in both passes
    assert {shifts for _, shifts, _ in ranks} == {(size // 2) * (of_keys + of_queries)}
    # A message that one rank does not miss is missed by another.
    assert set.intersection(*(set(undetected) for _, _, undetected in ranks)) == set()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_rank_has_the_same_work(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of (P + 1) / 2 pairs of shards; with the first queries alone the last rank would have P of them."""
    n, work = 4, dict[int, int]()
    add = SoftmaxSum.add

    def counted(self: SoftmaxSum, place: tuple[int, slice, slice], scores: Tensor, v: Tensor) -> None:
        thread = threading.get_ident()
        work[thread] = work.get(thread, 0) + scores.numel()
        add(self, place, scores, v)

    monkeypatch.setattr(SoftmaxSum, "add", counted)
    sizes = [n] * size

    def run(group: Group) -> tuple[int, int]:
        work[threading.get_ident()] = 0
        whole.differs(group, sizes)
        return group.rank, work[threading.get_ident()]

    whole = Whole(n * size)
    of_pair = R * H * n * n
    assert dict(on_one_line(size, run)) == dict.fromkeys(range(size), of_pair * (size + 1) / 2)


@pytest.mark.parametrize(("size", "share"), [(2, 0.75), (4, 0.6), (8, 0.55)])
def test_about_half_of_a_rings_bytes_are_sent(size: int, share: float) -> None:
    """Of all keys and values that a ring sends forward; sums have two numbers more than channels."""
    n, width = 16, 64
    sent = {"ring": 0.0, "causal": 0.0}
    for rank in range(size):
        with fake_mesh(ParallelPlan(sp=size), rank) as mesh, mesh.record() as log:
            for kind in sent:
                before = len(log.entries)
                _forward(mesh, n, width, causal=kind == "causal")
                sent[kind] += sum(entry.sent for entry in log.entries[before:])
    element, rows = 4, n * R * H
    assert sent["ring"] == element * rows * 2 * width * size * (size - 1)
    pairs = [(t, size - t) for t in range(1, size)]
    expected = sum(2 * width * ranks for t, ranks in pairs if 2 * t <= size)
    expected += sum(
        (2 * width + 2) * ranks * (0.5 if 2 * t == size else 1) for t, ranks in pairs if 2 * t >= size
    )
    assert sent["causal"] == element * rows * expected
    assert sent["causal"] < (share + 0.02) * sent["ring"]


def _forward(mesh: ParallelMesh, n: int, width: int, *, causal: bool) -> None:
    q, k, v = (torch.zeros(B, R, n, H, width) for _ in range(3))
    ring_attention(q, k, v, group=mesh.group("sp"), causal=causal)
