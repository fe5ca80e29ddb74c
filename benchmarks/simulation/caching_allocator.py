"""Model of PyTorch's caching allocator for CUDA, which counts memory without allocating it.

Sizes are rounded, blocks are cut out of segments and joined when they are free, and the smallest sufficient free block
is used. Therefore the allocator reserves more memory than the tensors need. Rules and numbers are those of PyTorch 2
(``c10/cuda/CUDACachingAllocator.cpp``) with one stream and without ``max_split_size_mb``.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from fastfold.memory.devices.device import DeviceFull

MIN_BLOCK = 512
SMALL_SIZE, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE_SEGMENT, MIN_LARGE_SEGMENT, ROUND_LARGE = 20 << 20, 10 << 20, 2 << 20


@dataclass(eq=False)
class Block:
    """Part of a segment.

    Attributes:
        address: Address of its first byte, in the model's own address space.
        size: Size in bytes.
        pool: Pool of the block.
        used: True if a tensor uses it.
        mapped: True if it has physical memory; only blocks of an expandable segment may have none.
        before: The preceding block in the segment.
        after: The following block in the segment.
    """

    address: int
    size: int
    pool: Pool
    used: bool = False
    mapped: bool = True
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes and return the rest as a new block."""
        rest = Block(self.address + size, self.size - size, self.pool, False, self.mapped, self, self.after)
        if rest.after is not None:
            rest.after.before = rest
        self.size, self.after = size, rest
        return rest

    def join(self) -> None:
        """Merge with the following block."""
        other = self.after
        assert other is not None
        self.size, self.after = self.size + other.size, other.after
        if self.after is not None:
            self.after.before = self


class Pool:
    """Blocks of small tensors, or of large ones.

    Args:
        small: True for blocks of small tensors.
    """

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._free: list[tuple[int, int, Block]] = []  # by size and address
        self.first: Block | None = None  # first block of the expandable segment

    def add(self, block: Block) -> None:
        """Add a free block."""
        bisect.insort(self._free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self._free[bisect.bisect_left(self._free, (block.size, block.address))]

    def best(self, size: int) -> Block | None:
        """Remove and return the smallest sufficient free block; None if there is none."""
        place = bisect.bisect_left(self._free, (size, -1))
        return self._free.pop(place)[2] if place < len(self._free) else None

    def free_blocks(self) -> list[Block]:
        """Return all free blocks."""
        return [block for _, _, block in self._free]


class CachingAllocator:
    """Simulation of the memory that PyTorch's allocator reserves.

    Args:
        limit: Memory of the device in bytes.
        expandable: True for one segment per pool that grows by pages (``expandable_segments:True``).

    Attributes:
        reserved: Bytes reserved now.
        peak: Largest number of bytes ever reserved.
        releases: Number of times that free segments or pages were returned because memory ran out.
    """

    def __init__(self, limit: int, *, expandable: bool = False) -> None:
        self.limit, self.expandable = limit, expandable
        self.reserved = self.peak = self.releases = 0
        self._pools = (Pool(True), Pool(False))
        self._end = 0

    def allocate(self, nbytes: int) -> Block:
        """Allocate a block for a tensor.

        Args:
            nbytes: Size in bytes, more than 0.

        Raises:
            DeviceFull: The device has not enough memory, even after all free memory was returned.
        """
        size = max(MIN_BLOCK, _rounded(nbytes, MIN_BLOCK))
        pool = self._pools[size > SMALL_SIZE]
        for attempt in (0, 1):
            block = pool.best(size) or self._new(pool, size)
            if block is not None:
                return self._take(block, size)
            if attempt == 0:
                self.releases += 1
                self._release()
        raise DeviceFull(size, self.reserved, self.limit, "a tensor, with free blocks of the allocator")

    def free(self, block: Block) -> None:
        """Free a block; the allocator keeps its memory."""
        block.used, pool = False, block.pool
        if block.after is not None and not block.after.used and block.after.mapped:
            pool.remove(block.after)
            block.join()
        if block.before is not None and not block.before.used and block.before.mapped:
            block = block.before
            pool.remove(block)
            block.join()
        pool.add(block)

    def _take(self, block: Block, size: int) -> Block:
        left = block.size - size
        if left >= MIN_BLOCK if block.pool.small or self.expandable else left > SMALL_SIZE:
            block.pool.add(block.cut(size))
        block.used = True
        return block

    def _grow(self, more: int) -> bool:
        if self.reserved + more > self.limit:
            return False
        self.reserved += more
        self.peak = max(self.peak, self.reserved)
        return True

    def _new(self, pool: Pool, size: int) -> Block | None:
        """Reserve memory for a new block; return None if the device has not enough."""
        if self.expandable:
            return self._mapped(pool, size)
        segment = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        if size >= MIN_LARGE_SEGMENT:
            segment = _rounded(size, ROUND_LARGE)
        if not self._grow(segment):
            return None
        block = Block(self._end, segment, pool)
        self._end += 2 * segment  # a gap, so that segments are not adjacent
        return block

    def _mapped(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the first place where free and unmapped blocks are adjacent over enough bytes."""
        if pool.first is None:
            pool.first = Block(self._end, 1 << 50, pool, mapped=False)
            self._end += 1 << 51
        start = self._place(pool.first, size)
        missing, end = [], start.address + size
        block: Block | None = start
        while block is not None and block.address < end:
            if not block.mapped:
                within = min(block.size, _rounded(end - block.address, pool.page))
                missing.append((block, within))
            block = block.after
        if not self._grow(sum(within for _, within in missing)):
            return None
        for block, within in missing:
            if within < block.size:
                block.cut(within)
            block.mapped = True
            pool.add(block)
        while start.size < size:
            assert start.after is not None
            pool.remove(start)
            pool.remove(start.after)
            start.join()
            pool.add(start)
        pool.remove(start)
        return start

    def _place(self, first: Block, size: int) -> Block:
        block: Block | None = first
        while block is not None:
            if not block.used and not block.mapped:
                start = block
                if block.before is not None and not block.before.used:
                    start = block.before
                found, room = start, 0
                while found is not None and not found.used and room < size:
                    room += found.size
                    found = found.after  # type: ignore[assignment]
                if room >= size:
                    return start
            block = block.after
        raise AssertionError("no place in the address space")

    def _release(self) -> None:
        """Return free memory to the device: whole segments, or whole pages of the expandable one."""
        for pool in self._pools:
            for block in pool.free_blocks():
                if self.expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _unmap(self, pool: Pool, block: Block) -> None:
        assert pool.first is not None
        origin = pool.first.address
        begin = origin + _rounded(block.address - origin, pool.page)
        end = origin + (block.address + block.size - origin) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            rest = block.cut(begin - block.address)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        self.reserved -= block.size
        block.mapped = False
        if block.after is not None and not block.after.mapped and not block.after.used:
            block.join()
        if block.before is not None and not block.before.mapped and not block.before.used:
            block.before.join()


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step
