"""Ring and all-to-all attention against attention of whole sequences, and a GPT trained on parts of its sequences."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.errors import ConfigError, InputError
from fastfold.kernels import reference
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import all_reduce
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.sequence_parallel.attention import ring_attention, ulysses_attention
from fastfold.parallel.sequence_parallel.module import METHODS, SequenceParallel
from tests.conftest import REPOSITORY
from tests.helpers.drop_reductions import SHIFTS, undetected_reductions
from tests.helpers.spawn_ranks import launch

# Batch, rows, positions, heads, channels: the ranks divide none of the positions and heads.
SHAPE = (2, 3, 9, 5, 4)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number of the whole tensor."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if found.numel() == 0:
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max()).item()


class _Whole:
    """Random tensors of whole sequences, the same on every rank, and attention by definition with its gradients."""

    def __init__(self, *, bias: bool, mask: bool, causal: bool, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(5)
        batch, rows, n, heads, _ = SHAPE
        leaves = [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(3)]
        if bias:
            leaves.append(torch.randn(batch, heads, n, n, generator=generator, dtype=torch.float64))
        self.leaves = [x.to(dtype).requires_grad_() for x in leaves]
        self.weights = torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)
        self.mask = None
        if mask:
            self.mask = (torch.rand(batch, rows, n, generator=generator) > 0.4).to(dtype)
            self.mask[0, 1] = 0
        self.causal = causal
        q, k, v, *rest = self.leaves
        future = torch.zeros(n, n, dtype=dtype).masked_fill(torch.ones(n, n).triu(1) > 0, -torch.inf)
        added = rest[0] if rest else torch.zeros(batch, heads, n, n, dtype=dtype)
        self.out = reference.attention(q, k, v, added + future if causal else added, self.mask)
        self.gradients = torch.autograd.grad((self.out * self.weights).sum(), self.leaves)


def _cases() -> list[_Whole]:
    return [
        _Whole(bias=True, mask=True, causal=False),
        _Whole(bias=False, mask=False, causal=True),
        _Whole(bias=True, mask=False, causal=True),
        _Whole(bias=False, mask=True, causal=False),
    ]


def _differs(whole: _Whole, method: str, group: Group, sizes: list[int]) -> float:
    """Largest difference of output and gradients of this rank's part."""
    start = sum(sizes[: group.rank])
    own = slice(start, start + sizes[group.rank])
    q, k, v = (x.detach()[:, :, own].clone().requires_grad_() for x in whole.leaves[:3])
    bias = [x.detach()[:, :, own].clone().requires_grad_() for x in whole.leaves[3:]]
    added = bias[0] if bias else None
    mask = None if whole.mask is None else whole.mask[..., own]
    attend: Any = METHODS[method]
    out = attend(q, k, v, added, mask, group=group, sizes=sizes, causal=whole.causal)
    found = torch.autograd.grad((out * whole.weights[:, :, own]).sum(), [q, k, v, *bias])
    expected = [whole.out.detach(), *whole.gradients]
    return max(
        _difference(one, other[:, :, own])
        for one, other in zip([out.detach(), *found], expected, strict=True)
    )


def _equal_to_definition() -> tuple[float, int, list[str]]:
    group = Group(dist.group.WORLD, "everyone")
    even = shard_sizes(SHAPE[2], group.size)
    # A rank without any positions, and one with most.
    odd = [0, 7, 2] if group.size == 3 else [0] * (group.size - 2) + [2, 7]
    worst = 0.0
    for number, whole in enumerate(_cases()):
        for method in METHODS:
            for sizes in (even, odd):
                found = _differs(whole, method, group, sizes)
                assert found < 1e-12, f"case {number}, {method}, {sizes}: {found}"
                worst = max(worst, found)
    whole = _cases()[0]
    return worst, *undetected_reductions(lambda: _differs(whole, "ring", group, even), names=SHIFTS)


@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_ranks_equals_the_definition_and_passes_everything_on(size: int) -> None:
    for worst, shifts, undetected in launch(_equal_to_definition, size):
        print(f"{size} ranks: worst difference {worst:.1e}, {shifts} shifts, each needed")
        assert shifts == 2 * (size - 1) + size
        assert undetected == []


def _on_a_grid() -> tuple[float, int, list[str]]:
    """Rows over the columns' groups, positions over the rows' groups: the bias is sharded both ways."""
    mesh = ParallelMesh(ParallelPlan(dap=4, dap_mode="grid"))
    row, column = mesh.group("dap_row"), mesh.group("dap_column")
    whole = _Whole(bias=True, mask=True, causal=False)
    n = SHAPE[2]
    rows, own, mine = column.shard(SHAPE[1]), row.shard(n), column.shard(n)

    def differs() -> float:
        q, k, v = (x.detach()[:, rows, own].clone().requires_grad_() for x in whole.leaves[:3])
        # Number k of the column has the bias of the column's queries for the keys of shard k.
        bias = whole.leaves[3].detach()[:, :, own, mine].clone().requires_grad_()
        assert whole.mask is not None
        out = ring_attention(
            q, k, v, bias, whole.mask[:, rows, own], group=row, sizes=shard_sizes(n, 2), bias_group=column
        )
        found = torch.autograd.grad((out * whole.weights[:, rows, own]).sum(), [q, k, v, bias])
        of_bias = whole.gradients[3][:, :, own, mine]
        expected = [x[:, rows, own] for x in (whole.out.detach(), *whole.gradients[:3])] + [of_bias]
        return max(_difference(*pair) for pair in zip([out.detach(), *found], expected, strict=True))

    return differs(), *undetected_reductions(differs)


def test_a_bias_sharded_both_ways_is_fetched_and_its_gradient_is_summed_where_it_lies() -> None:
    for worst, reductions, undetected in launch(_on_a_grid, 4):
        assert worst < 1e-12
        assert reductions == 2
        assert undetected == []


def _other_properties() -> None:
    group = Group(dist.group.WORLD, "everyone")
    sizes = shard_sizes(SHAPE[2], group.size)
    own = group.shard(SHAPE[2])
    _half_precision(group, sizes, own)
    _overlap(group, sizes, own)
    _bytes(group)


def _half_precision(group: Group, sizes: list[int], own: slice) -> None:
    """Scores and sums are not rounded to bfloat16, under autocast or not: only the result is."""
    whole = _Whole(bias=True, mask=True, causal=False, dtype=torch.bfloat16)
    q, k, v, bias = (x.detach()[:, :, own] for x in whole.leaves)
    wide_q, wide_k, wide_v, wide_bias = (x.detach().double() for x in whole.leaves)
    exact = reference.attention(wide_q, wide_k, wide_v, wide_bias, whole.mask)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = ring_attention(q, k, v, bias, whole.mask[..., own], group=group, sizes=sizes)  # type: ignore[index]
        assert found.dtype == torch.bfloat16
        assert _difference(found.double(), exact[:, :, own]) < 2**-8


def _overlap(group: Group, sizes: list[int], own: slice) -> None:
    """The next shard is under way when one is computed, and a shard's gradients when the next's are."""
    events: list[str] = []
    start: Any = async_ops.start_shift

    def noted(x: Tensor, *args: object) -> AsyncResult[Tensor]:
        number = sum(event.startswith("start") for event in events)
        events.append(f"start {number}")
        pending = start(x, *args)

        def finish() -> Tensor:
            events.append(f"use {number}")
            return pending.wait()

        return AsyncResult(finish)

    whole = _Whole(bias=False, mask=False, causal=False)
    q, k, v = (x.detach()[:, :, own].requires_grad_() for x in whole.leaves)
    product: Any = torch.Tensor.__matmul__
    patched: Any = torch.Tensor
    sends: Any = async_ops

    def matmul(x: Tensor, y: Tensor) -> Tensor:
        events.append("compute")
        found: Tensor = product(x, y)
        return found

    sends.start_shift, patched.__matmul__ = noted, matmul
    try:
        out = ring_attention(q, k, v, group=group, sizes=sizes)
        forward = list(events)
        events.clear()
        out.sum().backward()
    finally:
        sends.start_shift, patched.__matmul__ = start, product
    first = forward[: forward.index("use 0")]
    assert first[0] == "start 0"
    assert "compute" in first
    # Backward: keys of step 1 (0), gradients of step 0 (1), which are waited for after step 1's are computed.
    between = events[events.index("start 1") : events.index("use 1")]
    assert "compute" in between


def _bytes(group: Group) -> None:
    """What is sent is what the docstrings say."""
    mesh = ParallelMesh(ParallelPlan(sp=group.size))
    batch, rows, n, heads, width = 1, 2, 4 * group.size, 4, 3
    q, k, v = (torch.randn(batch, rows, 4, heads, width, requires_grad=True) for _ in range(3))
    shard = 4 * q.numel()
    for attend, forward, backward in (
        (ring_attention, 2 * (group.size - 1) * shard, (4 * (group.size - 1) + 2) * shard),
        (
            ulysses_attention,
            4 * (group.size - 1) / group.size * shard,
            4 * (group.size - 1) / group.size * shard,
        ),
    ):
        with mesh.record() as log:
            out = attend(q, k, v, group=mesh.group("sp"))
        assert log.sent == forward, (attend, n)
        with mesh.record() as log:
            out.sum().backward()
        assert log.sent == backward


def test_ring_attention_is_exact_in_half_precision_overlaps_and_sends_what_it_says() -> None:
    launch(_other_properties, 2)


@pytest.mark.parametrize("shape", [(2, 0, 9, 5, 4), (0, 3, 9, 5, 4), (0, 9, 5, 4)], ids=str)
def test_nothing_to_attend_for_gives_nothing(shape: tuple[int, ...]) -> None:
    """A rank of a grid may have no rows."""
    q = torch.randn(shape, requires_grad=True)
    bias = torch.randn(*shape[:-4], 5, 9, 9, requires_grad=True)
    for attend in (ring_attention, ulysses_attention):
        out = attend(q, q, q, bias, torch.ones(shape[:-2]), group=Group(None))
        found = torch.autograd.grad(out.sum(), [q, bias])
        assert out.shape == shape
        assert [x.shape for x in found] == [q.shape, bias.shape]
        assert not found[1].any()


def test_what_cannot_be_attended_to_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4, 5)
    with pytest.raises(InputError, match=r"expected bias of shape .* found \[1, 4, 3, 2\]"):
        ring_attention(q, q, q, torch.zeros(1, 4, 3, 2), group=Group(None))
    with pytest.raises(ConfigError, match="no submodule of MultiheadAttention: name the classes"):
        SequenceParallel(nn.Linear(2, 2), Group(None), attention=nn.MultiheadAttention)
    with pytest.raises(ConfigError, match="one of ring, ulysses, found 'star'"):
        SequenceParallel(nn.Linear(2, 2), Group(None), attention=nn.Linear, method="star")
    layer = SequenceParallel(nn.Linear(2, 2), Group(None), attention=nn.Linear)
    with pytest.raises(ConfigError, match="call shard first"):
        layer(torch.zeros(2))
    with pytest.raises(ConfigError, match="parallel already"):
        SequenceParallel(layer.module, Group(None), attention=nn.Linear)


def _masks_of_padding() -> str:
    """Masks for all keys and for own keys give the same; one that lacks keys of others is refused."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    x, padding = torch.randn(2, 5, 8, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 1:3] = padding[0, 4] = True
    expected = layer(x, src_key_padding_mask=padding)
    group = Group(dist.group.WORLD)
    sequence = SequenceParallel(copy.deepcopy(layer), group, attention=nn.MultiheadAttention)
    own = sequence.shard(x, 1)
    for mask in (padding, sequence.shard(padding)):
        found = sequence(own, src_key_padding_mask=mask)
        assert _difference(found, expected[:, group.shard(5)]) < 1e-12
    length = own.shape[1]
    try:
        sequence(own, src_mask=torch.zeros(length, length, dtype=torch.bool))
    except ConfigError as error:
        return str(error)
    return ""


def test_masks_of_padding_are_for_own_or_all_keys() -> None:
    for message, own in zip(launch(_masks_of_padding, 2), (3, 2), strict=True):
        expected = f"expected a mask [..., {own}, 5] for own queries and all keys, found [{own}, {own}]"
        assert expected in message


def _too_few_heads() -> str:
    q = torch.zeros(1, 1, 2, 1, 4)
    try:
        ulysses_attention(q, q, q, group=Group(dist.group.WORLD))
    except ConfigError as error:
        return str(error)
    return ""


def test_fewer_heads_than_ranks_are_refused_with_the_arithmetic() -> None:
    expected = "ulysses attention: expected at least one head for each of 2 ranks, found 1; use ring"
    assert launch(_too_few_heads, 2) == [expected] * 2


TOKENS = (3, 11)


def _gpt() -> tuple[nn.Module, type[nn.Module]]:
    sys.path.insert(0, str(REPOSITORY / "examples" / "gpt"))
    from gpt import GPT, Attention, GPTConfig

    torch.manual_seed(3)
    model = GPT(GPTConfig(vocabulary=17, context=16, layers=2, heads=5, width=20, checkpointing="block"))
    return model.double(), Attention


def _loss(logits: Tensor, following: Tensor) -> Tensor:
    """Sum over positions with a following token (not -1), divided by the number of all: parts add up to the whole."""
    count = TOKENS[0] * (TOKENS[1] - 1)
    return (
        F.cross_entropy(logits.flatten(0, -2), following.flatten(), ignore_index=-1, reduction="sum") / count
    )


def _trains(plan: ParallelPlan, method: str) -> float:
    """Three optimizer steps of the GPT on batches of different sizes and parts of sequences of different lengths."""
    mesh = ParallelMesh(plan)
    plain, attention = _gpt()
    model = copy.deepcopy(plain)
    sharded = SequenceParallel(
        model,
        mesh.group("sp"),
        attention=attention,
        positions=[model.positions],  # type: ignore[list-item]
        method=method,
    )
    # Not Adam: it divides by a gradient's size, and that of the keys' bias is zero but for rounding.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    generator = torch.Generator().manual_seed(4)
    rows = mesh.group("dp").shard(TOKENS[0])
    worst = 0.0

    def check(found: Tensor, expected: Tensor, what: str) -> None:
        nonlocal worst
        worst = max(worst, _difference(found, expected))
        assert worst < 1e-12, f"{plan}, {method}: {what} differs by {worst}"

    for _ in range(3):
        tokens = torch.randint(17, TOKENS, generator=generator)
        following = F.pad(tokens[:, 1:], (0, 1), value=-1)
        expected = plain(tokens)
        _loss(expected, following).backward()
        logits = sharded(sharded.shard(tokens[rows]))
        _loss(logits, sharded.shard(following[rows])).backward()
        check(logits.detach(), sharded.shard(expected.detach()[rows], 1), "output")
        # A copy, as for an average of weights, computes with its own parameters on the same parts.
        averaged = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in averaged.parameters():
                parameter.zero_()
            assert averaged(sharded.shard(tokens[rows])).abs().max() == 0
        wanted = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.grad = all_reduce(parameter.grad, mesh.group("replicas"))
            check(parameter.grad, wanted[name].grad, f"gradient of {name}")  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            check(parameter.detach(), wanted[name].detach(), name)
    return worst


def _all_train() -> float:
    size = dist.get_world_size()
    plans = [ParallelPlan(sp=size)] + ([ParallelPlan(dp=2, sp=2)] if size == 4 else [])
    return max(_trains(plan, method) for plan in plans for method in METHODS)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_gpt_on_parts_of_sequences_trains_as_on_one_device(size: int) -> None:
    print("worst difference", max(launch(_all_train, size)))
