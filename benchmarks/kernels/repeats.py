"""Number of times that the warps of a program make the same product, read from Triton's intermediate code (TTGIR).

A layout spreads a block over warps. If a block has fewer tiles of a tensor core than a program has warps, several warps
get the same tile, and each makes all of its products: redundant work in the machine code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_LAYOUT = re.compile(r"^(#\w+) = #ttg\.(nvidia_mma|blocked)<\{(.*)\}>", re.MULTILINE)
_LIST = re.compile(r"(\w+) = \[([\d, ]+)\]")
_DOT = re.compile(
    r" (?:tt\.dot|ttng\.warp_group_dot) .*? : .*?<([\dx]+)x\w+, .* -> tensor<([\dx]+)x\w+, (#\w+)>"
)
_FIFTH_GENERATION = re.compile(r" ttng\.tc_gen5_mma .*? : !ttg\.memdesc<(\d+)x(\d+)x.*?memdesc<\d+x(\d+)x")
_ANY_DOT = re.compile(r" (?:tt\.dot(?:_scaled)?|ttng\.(?:warp_group_dot|tc_gen5_mma(?:_scaled)?)) ")


@dataclass
class _Loop:
    indent: int
    needed: int = 0
    made: int = 0
    inner: list[_Loop] = field(default_factory=list)

    def innermost(self) -> list[_Loop]:
        """Return the loops with products that contain no other such loop."""
        found = [x for loop in self.inner for x in loop.innermost()]
        return found or ([self] if self.needed else [])


def repeats_of(ttgir: str) -> float:
    """Return a program's multiply-adds over the necessary ones, in the innermost loop with the most of them.

    If no loop has products, the whole kernel counts. Products of the fifth generation of tensor cores are made once by
    the whole program.

    Args:
        ttgir: Text of the intermediate code, ``compiled.asm["ttgir"]``.

    Returns:
        At least 1; 1 for a kernel without products.

    Raises:
        ValueError: A product has an unknown form or layout.
    """
    layouts = {
        name: (kind, {key: [int(x) for x in numbers.split(",")] for key, numbers in _LIST.findall(text)})
        for name, kind, text in _LAYOUT.findall(ttgir)
    }
    everything = _Loop(-1)
    stack = [everything]
    for line in ttgir.splitlines():
        text = line.lstrip()
        indent = len(line) - len(text)
        if re.search(r"(^| )scf\.(for|while) ", text):
            stack[-1].inner.append(_Loop(indent))
            stack.append(stack[-1].inner[-1])
        elif text.startswith("}") and indent == stack[-1].indent and not text.startswith("} do"):
            stack.pop()
        elif _ANY_DOT.search(line):
            products, repeats = _product(line, layouts)
            stack[-1].needed += products
            stack[-1].made += products * repeats
    main = max(everything.innermost(), key=lambda x: x.made, default=_Loop(-1, 1, 1))
    return main.made / main.needed


def _product(line: str, layouts: dict[str, tuple[str, dict[str, list[int]]]]) -> tuple[int, int]:
    """Return the multiply-adds of a line, and the number of times that each is made."""
    if found := _FIFTH_GENERATION.search(line):
        return math.prod(map(int, found.groups())), 1
    found = _DOT.search(line)
    if found is None or found[3] not in layouts:
        raise ValueError(f"unknown form or layout of a product; extend repeats_of for it: {line.strip()}")
    shape = [int(x) for x in found[2].split("x")]
    inner = int(found[1].split("x")[-1])
    kind, numbers = layouts[found[3]]
    return math.prod(shape) * inner, _repeats(shape, kind, numbers)


def _repeats(shape: Sequence[int], kind: str, numbers: dict[str, list[int]]) -> int:
    """Return the number of times that each element of a block is made."""
    if kind == "nvidia_mma":
        tiles, workers = numbers["instrShape"], numbers["warpsPerCTA"]
    else:
        threads = zip(numbers["threadsPerWarp"], numbers["warpsPerCTA"], strict=True)
        tiles, workers = numbers["sizePerThread"], [a * b for a, b in threads]
    # An instruction's third number is the size of its sum, which repeats nothing.
    axes = zip(shape, tiles, workers, strict=False)
    return math.prod(max(1, count // max(1, size // tile)) for size, tile, count in axes)
