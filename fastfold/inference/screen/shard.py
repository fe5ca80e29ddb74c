"""Part of a list of targets for one of several runs: ``--shard 2/8``."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastfold.errors import ConfigError

if TYPE_CHECKING:
    from fastfold.data.targets import Target


@dataclass(frozen=True)
class Shard:
    """One of several parts, by its number from 1."""

    index: int
    count: int

    def of(self, targets: Sequence[Target], costs: Sequence[float]) -> list[int]:
        """Return the targets of this part as indices, in the order of the input.

        Every target is in one part, independent of the order of the input, and the parts cost about the same. In the
        order of cost, each target is added to the part with the lowest cost so far (longest processing time first,
        Graham 1969).
        """
        from fastfold.utils.hashing import input_hash  # NumPy is slow to import

        digests = [
            input_hash(target.record, [chain.sequence for chain in target.chains]) for target in targets
        ]
        parts = [(0.0, number) for number in range(1, self.count + 1)]
        mine = []
        for i in sorted(range(len(targets)), key=lambda i: (-costs[i], digests[i])):
            cost, number = parts[0]
            heapq.heapreplace(parts, (cost + costs[i], number))
            if number == self.index:
                mine.append(i)
        return sorted(mine)


def parse_shard(text: str) -> Shard:
    """Parse a part written as ``2/8``, the second of eight, or raise ConfigError."""
    found = re.fullmatch(r"\s*(\d{1,6})/(\d{1,6})\s*", text, re.ASCII)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(
            f"shard {text[:40]!r}: write I/N with I from 1 to N, for example 1/8 and so on to 8/8"
        )
    return Shard(int(found[1]), int(found[2]))
