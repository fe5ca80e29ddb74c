"""Loops, instructions, products and loads in the machine code of a kernel, read without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_PRODUCT = re.compile(r"[HIQ]MMA\.(\d+)x?(\d+)?x?(\d+)?|HGMMA\.(\d+)x(\d+)x(\d+)")
_WIDTH = re.compile(r"\.[US](8|16)\b|\.(64|128)\b")


@dataclass(frozen=True)
class Instruction:
    """Instruction of a warp.

    Attributes:
        address: Byte in the kernel's code.
        name: Operation with its modifiers, such as ``LDG.E.128``.
        conditional: True if a predicate guards it.
        target: Address of a jump, else None.
        operands: Text after the name in the listing.
    """

    address: int
    name: str
    conditional: bool
    target: int | None
    operands: str = ""

    @property
    def products(self) -> int:
        """Multiply-adds of a warp, in matrices or one for each thread."""
        if self.name.startswith(("FFMA", "FMUL2", "HFMA2")):
            return 32
        found = _PRODUCT.match(self.name)
        if found is None:
            return 0
        if found[4] is not None:  # four warps share it
            return int(found[4]) * int(found[5]) * int(found[6]) // 4
        # 16816 is 16 x 8 x 16, 1688 is 16 x 8 x 8
        return 16 * 8 * int(found[1][3:])

    @property
    def unit(self) -> str | None:
        """Generation of the tensor cores of a matrix product; None for all other instructions."""
        for prefix, name in (("HMMA", "mma"), ("HGMMA", "wgmma"), ("UTC", "tcgen05")):
            if self.name.startswith(prefix) and "MMA" in self.name:
                return name
        return None

    @property
    def loaded(self) -> int:
        """Bytes that a thread loads from global memory."""
        if not self.name.startswith(("LDG.", "LDGSTS")):
            return 0
        found = _WIDTH.search(self.name)
        return 4 if found is None else int(found[1] or found[2]) // 8


@dataclass(frozen=True)
class Region:
    """Instructions of a loop, or of a whole kernel without a loop with products.

    Attributes:
        instructions: Instructions of a warp.
        products: Multiply-adds of a warp.
        load_bytes: Mean bytes of a thread's loads from global memory; 0 without any.
        unit: Unit that makes the products: ``mma``, ``wgmma``, ``tcgen05``, or ``fma`` without tensor cores.
    """

    instructions: int
    products: int
    load_bytes: float
    unit: str


def listing(compiled: Any) -> list[Instruction]:
    """Return the instructions of a kernel that Triton compiled for an NVIDIA GPU."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse(text: str) -> list[Instruction]:
    """Parse the instructions of a listing by ``cuobjdump -sass``."""
    found = []
    for address, predicate, name, operands in _LINE.findall(text):
        # The assembler also leaves loops by CALL.REL.NOINC, which does not return.
        jump = _TARGET.search(operands.strip()) if name.startswith(("BRA", "CALL")) else None
        conditional = bool(predicate) or name.startswith("CALL") or bool(re.match(r"\s*!?U?P\d", operands))
        target = int(jump[1], 16) if jump else None
        found.append(Instruction(int(address, 16), name, conditional, target, operands.strip()))
    return found


def product_loops(code: list[Instruction]) -> list[Region]:
    """Return the innermost loops with products, in order; the whole kernel if there is none.

    If tensor cores are used, fused multiply-adds of a thread do not count as products.
    """
    multiplies = [x.unit is not None for x in code]
    if not any(multiplies):
        multiplies = [x.products > 0 for x in code]
    loops = [body for body in _natural_loops(code) if any(multiplies[i] for i in body)]
    innermost = [x for x in loops if not any(y < x for y in loops)]
    return [_region([code[i] for i in sorted(x)]) for x in innermost] or [_region(code)]


def _region(code: list[Instruction]) -> Region:
    loads = [x.loaded for x in code if x.loaded]
    units = {x.unit for x in code} - {None}
    products = sum(x.products for x in code if not units or x.unit is not None)
    instructions = sum(not x.name.startswith("NOP") for x in code)
    return Region(
        instructions, products, sum(loads) / max(1, len(loads)), "+".join(sorted(map(str, units))) or "fma"
    )


def _natural_loops(code: list[Instruction]) -> list[frozenset[int]]:
    """Return the positions of every loop's instructions: all that reach a jump back to a dominating block."""
    at = {x.address: i for i, x in enumerate(code)}
    starts = {0} | {at[x.target] for x in code if x.target in at}
    starts |= {i + 1 for i, x in enumerate(code[:-1]) if x.target is not None or x.name.startswith("EXIT")}
    order = sorted(starts)
    blocks = [range(a, b) for a, b in zip(order, [*order[1:], len(code)], strict=True)]
    of = {block.start: n for n, block in enumerate(blocks)}
    after: list[set[int]] = []
    for n, block in enumerate(blocks):
        last = code[block[-1]]
        next_ones = {of[at[last.target]]} if last.target in at else set()
        if n + 1 < len(blocks) and not (last.name.startswith(("BRA", "EXIT")) and not last.conditional):
            next_ones.add(n + 1)
        after.append(next_ones)
    before: list[set[int]] = [set() for _ in blocks]
    for n, next_ones in enumerate(after):
        for other in next_ones:
            before[other].add(n)
    dominators = _dominators(before)
    bodies: dict[int, set[int]] = {}
    for n, next_ones in enumerate(after):
        for head in next_ones & dominators[n]:
            body, waiting = bodies.setdefault(head, {head}), [n]
            while waiting:
                block_number = waiting.pop()
                if block_number not in body:
                    body.add(block_number)
                    waiting += before[block_number]
    return [frozenset(i for n in body for i in blocks[n]) for _, body in sorted(bodies.items())]


def _dominators(before: list[set[int]]) -> list[set[int]]:
    """Return for each block those that every path from the first block passes; none for unreachable blocks."""
    reached = {0}
    everything = set(range(len(before)))
    found = [{0}] + [set(everything) for _ in before[1:]]
    changed = True
    while changed:
        changed = False
        for n in range(1, len(before)):
            come = [found[x] for x in before[n] if x in reached]
            if not come:
                continue
            mine = set.intersection(*come) | {n}
            if n not in reached or mine != found[n]:
                reached.add(n)
                found[n], changed = mine, True
    return [x if n in reached else set() for n, x in enumerate(found)]
