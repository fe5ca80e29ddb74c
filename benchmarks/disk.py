"""Waiting times of a training step for a disk, under ``policy="nvme"`` of ``fastfold.memory.Gemini``.

A buffer of 64 MiB that is not in memory is read in three ways: without announcement, announced by one call to the
kernel (which reads a few megabytes ahead), and announced to the tier's threads, with a pause for other work in between.
It is written in two ways: through the memory map, which reads its pages first, and by the tier.

    python benchmarks/disk.py FOLDER
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastfold.memory import NvmeTier

ELEMENTS = 1 << 24
PAUSE_S = 0.3
REPEATS = 7


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="folder on the disk to measure")
    tier = NvmeTier(parser.parse_args().folder)
    tier.preallocate(4 * ELEMENTS)
    waiting = tier.allocate_kept(ELEMENTS, torch.float32).fill_(1.0)
    here = torch.ones(ELEMENTS)
    file = tier._file
    assert file is not None

    def forget() -> None:
        file.map.flush()
        file.map.madvise(getattr(mmap, "MADV_PAGEOUT", 21))
        os.posix_fadvise(file._file, 0, file.size, os.POSIX_FADV_DONTNEED)

    def ahead(ask: Callable[[], None]) -> Callable[[], None]:
        def prepare() -> None:
            forget()
            ask()
            time.sleep(PAUSE_S)

        return prepare

    def milliseconds(prepare: Callable[[], None], work: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            prepare()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    def read() -> object:
        return here.copy_(waiting)

    rows = {
        "read, not announced": milliseconds(forget, read),
        "read, announced by one call": milliseconds(
            ahead(lambda: file.map.madvise(mmap.MADV_WILLNEED)), read
        ),
        "read, announced to the threads": milliseconds(ahead(lambda: tier.announce(waiting)), read),
        "the announcement itself": milliseconds(forget, lambda: tier.announce(waiting)),
        "written through the map": milliseconds(forget, lambda: waiting.copy_(here)),
        "written by the tier": milliseconds(forget, lambda: tier.write(waiting, here)),
    }
    for what, found in rows.items():
        print(f"{what:32} {found:8.1f} ms")


if __name__ == "__main__":
    main()
