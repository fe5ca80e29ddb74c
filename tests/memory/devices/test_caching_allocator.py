"""The model of PyTorch's allocator: its rounding, its segments, splitting and joining, and what it gives back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from benchmarks.simulation.caching_allocator import Block, CachingAllocator
from fastfold.memory import DeviceFull, SimulatedDevice

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("wanted", "size", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB + 5, 22 * MIB, 22 * MIB),  # too little is left to be cut off
    ],
)
def test_sizes_are_rounded_and_segments_are_those_of_pytorch(wanted: int, size: int, segment: int) -> None:
    allocator = CachingAllocator(1 << 40)
    assert allocator.allocate(wanted).size == size
    assert allocator.reserved == allocator.peak == segment


def test_a_free_block_is_used_again_the_smallest_that_is_enough_and_neighbours_become_one() -> None:
    allocator = CachingAllocator(1 << 40)
    large, _ = allocator.allocate(60 * MIB), allocator.allocate(30 * MIB)
    middle = allocator.allocate(40 * MIB)
    for block in (large, middle):
        allocator.free(block)
    assert allocator.allocate(35 * MIB).address == middle.address
    first, second = allocator.allocate(20 * MIB), allocator.allocate(40 * MIB)  # both out of the large one
    assert second.address == first.address + 20 * MIB
    assert allocator.reserved == 130 * MIB
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(60 * MIB).address == large.address
    assert allocator.reserved == allocator.peak == 130 * MIB


def test_segments_that_are_free_are_given_back_before_memory_ends() -> None:
    """A segment of which a part is in use stays: that is how memory ends while enough of it is free."""
    allocator = CachingAllocator(100 * MIB)
    blocks = [allocator.allocate(20 * MIB) for _ in range(5)]
    for block in blocks[:3]:
        allocator.free(block)
    assert allocator.allocate(60 * MIB).size == 60 * MIB  # out of three segments' memory
    assert (allocator.releases, allocator.reserved) == (1, 100 * MIB)

    allocator = CachingAllocator(100 * MIB)
    whole = allocator.allocate(100 * MIB)
    allocator.free(whole)
    parts = [allocator.allocate(25 * MIB) for _ in range(4)]
    for part in parts[::2]:
        allocator.free(part)
    with pytest.raises(DeviceFull, match="104,857,600 of 104,857,600 are in use"):
        allocator.allocate(50 * MIB)


def test_an_expandable_segment_gives_pages_back_and_maps_them_elsewhere() -> None:
    """The same order of use as above: what is free in pieces can be one tensor."""
    allocator = CachingAllocator(100 * MIB, expandable=True)
    parts = [allocator.allocate(20 * MIB) for _ in range(5)]
    for part in parts[::2]:
        allocator.free(part)
    assert allocator.reserved == 100 * MIB
    assert allocator.allocate(50 * MIB).size == 50 * MIB
    assert allocator.releases == 1
    assert allocator.reserved <= 100 * MIB


def test_an_expandable_segment_grows_by_pages_behind_what_is_free() -> None:
    allocator = CachingAllocator(1 << 40, expandable=True)
    first = allocator.allocate(5 * MIB)
    assert allocator.reserved == 20 * MIB
    second = allocator.allocate(25 * MIB)  # 15 MiB are there
    assert second.address == first.address + 5 * MIB
    assert allocator.reserved == 40 * MIB
    assert allocator.allocate(100).pool.small
    assert allocator.reserved == 42 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_what_is_held_is_enough_for_them(expandable: bool) -> None:
    draw, limit = random.Random(0), 600 * MIB
    allocator, held = CachingAllocator(limit, expandable=expandable), list[Block]()
    ended = 0
    for _ in range(4000):
        if held and draw.random() < 0.5:
            allocator.free(held.pop(draw.randrange(len(held))))
            continue
        try:
            held.append(allocator.allocate(int(2 ** draw.uniform(4, 27))))
        except DeviceFull:
            ended += 1
            for _ in range(min(5, len(held))):
                allocator.free(held.pop(draw.randrange(len(held))))
        places = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        assert sum(block.size for block in held) <= allocator.reserved <= allocator.peak <= limit
    assert ended > 0
    for block in held:
        allocator.free(block)
    # What comes next needs nearly all: everything that is free has become one, or is given back.
    assert allocator.allocate(limit - 60 * MIB).size == limit - 60 * MIB


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_a_simulated_device_has_its_tensors_held_by_an_allocator(kind: str) -> None:
    """Also those whose memory is given back and asked for again."""
    allocator = CachingAllocator(30 * MIB)
    device = SimulatedDevice(1 << 40, kind, allocator=allocator)
    with device.running():
        x = torch.empty(10 * MIB, dtype=torch.uint8, device=kind)
        y = torch.empty(300, dtype=torch.uint8, device=kind)
        assert (device.used, allocator.reserved) == (10 * MIB + 300, 12 * MIB)
        x.untyped_storage().resize_(0)
        device.resized(x)
        z = torch.empty(10 * MIB, dtype=torch.uint8, device=kind)
        assert allocator.reserved == 12 * MIB  # in its place
        x.untyped_storage().resize_(10 * MIB)
        device.resized(x)
        assert allocator.reserved == 22 * MIB
        with pytest.raises(DeviceFull):
            torch.empty(10 * MIB, dtype=torch.uint8, device=kind)
        del x, y, z
        assert torch.empty(26 * MIB, dtype=torch.uint8, device=kind).nbytes == 26 * MIB
