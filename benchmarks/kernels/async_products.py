"""Registers of asynchronous products of Hopper's tensor cores that machine code changes too early.

Usage: python -m benchmarks.kernels.async_products [--match TEXT]

A ``wgmma`` reads its first factor, and adds to its sums, in registers while the warp continues. Until the warp has
waited for it (``WARPGROUP.DEPBAR``), the factor's registers must not be written, and the sums neither read nor written.
Older assemblers are reported to break this rule; the reports name CUDA 13.3 as the first release that keeps it.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from benchmarks.kernels.compilation import no_gpu
from benchmarks.kernels.machine_code import Instruction, listing
from benchmarks.kernels.variants import all_variants

HOPPER = 90
"""Compute capability with asynchronous products."""

_REGISTER = re.compile(r"\bR(\d+)\b")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x\d+\.(F32|F16)")
_WAIT = re.compile(r"gsb\d+, (0x[0-9a-f]+|\d+)")
_FACTOR_REGISTERS = 4
# Instructions that do not write their first operand.
_WRITES_NONE = (
    "ST",
    "RED",
    "BAR",
    "BRA",
    "EXIT",
    "WARP",
    "CALL",
    "RET",
    "UTMA",
    "SYNCS",
    "NOP",
    "MEMBAR",
    "ATOMS.POPC",
)
_WIDTHS = {".64": 2, ".128": 4, ".WIDE": 2}


@dataclass(frozen=True)
class Pending:
    """Products that a warp started together and has not waited for.

    Attributes:
        factors: Registers that they read.
        sums: Registers that they add to.
    """

    factors: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()


def early_changes(code: list[Instruction]) -> list[str]:
    """Find instructions that change registers of a pending asynchronous product, or touch its sums.

    Args:
        code: Machine code of a kernel for compute capability 9.0, in order of addresses.

    Returns:
        A line for each of them: address, name and registers; empty if the rule is kept.
    """
    at = {x.address: i for i, x in enumerate(code)}
    found, seen = {}, set()
    waiting: list[tuple[int, tuple[Pending, ...]]] = [(0, ())]
    while waiting:
        position, groups = waiting.pop()
        while position < len(code) and (position, groups) not in seen:
            seen.add((position, groups))
            step = code[position]
            groups = _after(step, groups, found)
            if step.target in at:
                waiting.append((at[step.target], groups))
                if not step.conditional:
                    break
            if step.name.startswith("EXIT") and not step.conditional:
                break
            position += 1
    return [found[address] for address in sorted(found)]


def _after(step: Instruction, groups: tuple[Pending, ...], found: dict[int, str]) -> tuple[Pending, ...]:
    """Return the pending products after an instruction; note a broken rule in ``found``."""
    product = _PRODUCT.match(step.name)
    if product is None:
        if step.name.startswith("WARPGROUP.DEPBAR"):
            wait = _WAIT.search(step.operands)
            left = int(wait[1], 0) if wait else 0
            return groups[max(0, len(groups) - left) :] if left else ()
        if groups:
            written, read = _registers(step)
            factors = frozenset().union(*(group.factors for group in groups))
            sums = frozenset().union(*(group.sums for group in groups))
            broken = (written & factors) | ((written | read) & sums)
            if broken:
                names = ", ".join(f"R{register}" for register in sorted(broken))
                found[step.address] = f"{step.address:#06x} {step.name} {step.operands}: {names} in use"
        return groups
    operands = [part.strip() for part in step.operands.split(",")]
    count = int(product[1]) // (2 if product[2] == "F32" else 4)
    sums = _span(operands[0], count)
    factors = _span(operands[1], _FACTOR_REGISTERS)
    return (*groups, Pending(factors, sums))


def _span(operand: str, count: int) -> frozenset[int]:
    register = _REGISTER.match(operand)
    return frozenset() if register is None else frozenset(range(int(register[1]), int(register[1]) + count))


def _registers(step: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Return the registers that an instruction writes, and those that it reads."""
    operands = [part.strip() for part in step.operands.split(",")]
    width = next((count for name, count in _WIDTHS.items() if name in step.name), 1)
    if step.name.startswith("CS2R") and ".32" not in step.name:
        width = 2
    writes = not step.name.startswith(_WRITES_NONE)
    written = _span(operands[0], width) if writes else frozenset()
    rest = operands[1:] if writes else operands
    return written, frozenset(int(x) for operand in rest for x in _REGISTER.findall(operand))


def main() -> int:
    """Scan the kernels shipped for Hopper; print findings, and the number of kernels with such products.

    Returns:
        The exit code: 1 if a kernel breaks the rule.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="only kernels whose name contains this text")
    options = parser.parse_args()
    scanned = number = broken = 0
    for variant in all_variants():
        if HOPPER not in variant.architectures or options.match not in variant.name:
            continue
        with no_gpu(HOPPER):
            compiled = variant.kernel.run(*variant.arguments, grid=(1,), warmup=True, **variant.options)
        code = listing(compiled)
        changes = early_changes(code)
        scanned, broken = scanned + 1, broken + bool(changes)
        number += any(x.unit == "wgmma" for x in code)
        for line in changes:
            print(f"{variant.name}: {line}", flush=True)
    print(f"{scanned} kernels, {number} with asynchronous products, {broken} change registers too early")
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
