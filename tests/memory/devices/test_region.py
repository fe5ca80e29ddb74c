"""Parts of a region: free as soon as nobody holds them, the smallest gap first, aligned."""

from __future__ import annotations

import torch

from fastfold.memory.devices.tiers import MemoryRegion, smallest_gap


def test_a_part_is_free_when_nobody_holds_it() -> None:
    region = MemoryRegion(torch.zeros(100, dtype=torch.uint8))
    first, second = region.hand_out(0, 10, torch.float32), region.hand_out(40, 5, torch.float64)
    assert region.used() == [(0, 40), (40, 80)]
    assert region.gap(21, 1) is None
    assert region.gap(20, 1) == (20, 80)
    first.fill_(1.0)
    assert second.sum() == 0
    del first
    assert region.used() == [(40, 80)]
    assert region.gap(21, 1) == (40, 0)


def test_parts_begin_on_multiples_of_the_alignment() -> None:
    region = MemoryRegion(torch.zeros(100, dtype=torch.uint8))
    held = region.hand_out(0, 33, torch.uint8)
    assert region.gap(36, 64) == (36, 64)
    assert region.gap(37, 64) is None
    assert region.gap(37, 1) == (67, 33)
    del held


def test_the_smallest_gap_of_all_regions_is_found() -> None:
    regions = [MemoryRegion(torch.zeros(size, dtype=torch.uint8)) for size in (100, 50, 70)]
    held = regions[1].hand_out(0, 20, torch.uint8)
    assert smallest_gap(regions, 30, 1) == (regions[1], 20)
    assert smallest_gap(regions, 31, 1) == (regions[2], 0)
    assert smallest_gap(regions, 101, 1) is None
    assert smallest_gap([], 0, 1) is None
    del held
