"""Flat buffers of parameters, and their even shards over nested groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.buckets import Buckets, Sharding
from tests.helpers.thread_ranks import on_a_grid

SHAPES = [(2, 3), (5,), (), (4, 4), (0, 3)]


def _parameters() -> list[Tensor]:
    found = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)]
    return [*found, torch.ones(3, dtype=torch.bfloat16), torch.ones(7, dtype=torch.bfloat16)]


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("elements", [1, 12, 10_000])
def test_every_parameter_is_in_one_bucket_from_the_last_to_the_first(ranks: int, elements: int) -> None:
    """A bucket has one dtype, is closed when it has enough, and its length divides by the ranks."""
    parameters = _parameters()
    buckets = Buckets(parameters, ranks, elements)
    numbers = [number for bucket in buckets for number in bucket.numbers]
    assert sorted(numbers) == list(range(len(parameters)))
    assert len(buckets) == len(list(buckets))
    for bucket in buckets:
        assert list(bucket.numbers) == sorted(bucket.numbers, reverse=True)
        assert len({parameters[number].dtype for number in bucket.numbers}) == 1
        assert bucket.sizes == tuple(parameters[number].numel() for number in bucket.numbers)
        assert sum(bucket.sizes[:-1]) < elements
        assert bucket.length % ranks == 0
        assert 0 <= bucket.length - sum(bucket.sizes) < ranks
    assert elements < 10_000 or len(buckets) == 2


def test_buffers_are_joined_split_and_cut() -> None:
    parameters = _parameters()
    for bucket in Buckets(parameters, 4, 12):
        flat = Buckets(parameters, 4, 12).join(bucket, parameters)
        assert flat.shape == (bucket.length,)
        assert not flat[sum(bucket.sizes) :].any()
        views = Buckets(parameters, 4, 12).split(bucket, flat)
        assert all(torch.equal(view, parameters[number]) for number, view in views.items())
        assert all(
            view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for view in views.values()
        )
        missing = Buckets(parameters, 4, 12).join(bucket, [None] * len(parameters))
        assert not missing.any()
        assert missing.dtype == flat.dtype
        for start in range(0, bucket.length, 3):
            part = slice(start, min(start + 3, bucket.length))
            found = Buckets(parameters, 4, 12).spans(bucket, part)
            covered = torch.zeros(part.stop - part.start)
            for number, (of_parameter, of_part) in found.items():
                own = parameters[number].flatten()[of_parameter]
                assert torch.equal(flat[part][of_part], own)
                covered[of_part] += 1
            inside = torch.arange(part.start, part.stop) < sum(bucket.sizes)
            assert torch.equal(covered, inside.float())


def test_shards_of_shards_are_consecutive_and_come_back_whole() -> None:
    """Two by three ranks: sums over all of them, of which each keeps its part; groups of one do nothing."""
    length = 12
    buffers = torch.randn(6, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(outer: Group, inner: Group) -> tuple[Tensor, ...]:
        sharding = Sharding([outer, Group(None, "alone"), inner])
        own = buffers[3 * outer.rank + inner.rank]
        shard = sharding.start_reduce_scatter(own.clone())()
        assert sharding.ranks == 6
        return (
            torch.arange(length)[sharding.own(length)],
            shard,
            sharding.start_all_reduce(own)(),
            sharding.gather(shard),
        )

    total = buffers.sum(0)
    found = on_a_grid((2, 3), run)
    assert [own.tolist() for own, *_ in found] == [[2 * rank, 2 * rank + 1] for rank in range(6)]
    for own, shard, everything, gathered in found:
        torch.testing.assert_close(shard, total[own])
        torch.testing.assert_close(everything, total)
        torch.testing.assert_close(gathered, total)
    alone = Sharding([Group(None)])
    assert (alone.ranks, alone.own(5)) == (1, slice(0, 5))
    assert alone.gather(total) is alone.start_reduce_scatter(total)() is total
