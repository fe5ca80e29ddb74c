"""Every kernel that ships compiles for every architecture that it ships for, and fits into the registers."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

import fastfold.kernels
from benchmarks.kernels.ahead_of_time import former_rows, unknown_defect
from benchmarks.kernels.compilation import build
from benchmarks.kernels.variants import CHIPS, ROW_WIDTHS, KernelVariant, Needs, all_variants, timed_entries
from fastfold.errors import ConfigError
from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.common.tuning import FALLBACK, configurations
from tests.conftest import REPOSITORY
from tests.helpers.compiler import run_program

BUILD = """
import dataclasses, json
from unittest import mock
from benchmarks.kernels import variants
from benchmarks.kernels.compilation import build

first_only, spills_allowed, known = arguments
if first_only:  # all kernels ship for the least width
    lists = ("ROW_WIDTHS", "WIDTHS", "ATTENTION_CHANNELS")
    with mock.patch.multiple(variants, **{name: getattr(variants, name)[:1] for name in lists}):
        found = variants.all_variants.__wrapped__()
else:
    found = variants.all_variants()
kernels = set()
for variant in found:
    module, kernel = variant.kernel.fn.__module__, variant.kernel.__name__
    if not (first_only and kernel in kernels):
        for architecture in (90,) if first_only else variant.architectures:
            needs = build(variant, architecture)
            row = {"module": module, "name": variant.name, "architecture": architecture}
            allowed = max(spills_allowed, known.get(f"{variant.name} sm_{architecture}", 0))
            counted = dataclasses.replace(needs, spills=0) if needs.spills <= allowed else needs
            print(json.dumps(row | dataclasses.asdict(needs) | {"defect": variant.defect(counted, architecture)}))
    kernels.add(kernel)
"""

FOLDER = Path(fastfold.kernels.__file__).parent
MODULES = {
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if re.search(r"^def \w+_kernel\(", path.read_text(encoding="utf-8"), re.MULTILINE)
}
"""Every module that kernels live in, so that none is forgotten in the lists of variants."""


TABLE = REPOSITORY / "benchmarks" / "results" / "ahead_of_time.csv"

SPILLS = REPOSITORY / "benchmarks" / "results" / "spills_triton_3.6.csv"
"""What spills with the oldest Triton that is supported."""

KNOWN_SPILLS = REPOSITORY / "benchmarks" / "results" / "known_spills.csv"
"""What spills with the Triton of the table: small parts of a few kernels on RTX cards, and entries that were timed."""

SPILLS_HOPPER = REPOSITORY / "benchmarks" / "results" / "spills_hopper.csv"
"""What spills on Hopper with older versions of Triton, by each of their assemblers."""

OLDEST = "FASTFOLD_OLDEST_TRITON"
"""Environment variable: the folder that ``pip install --no-deps --target FOLDER triton==3.6.0`` filled."""


def _build(first_only: bool) -> list[dict[str, Any]]:
    return run_program(BUILD, first_only, _spills_allowed(), _known_spills())


def _known_spills() -> dict[str, int]:
    """Bytes a thread by kernel and architecture."""
    return {" ".join(key): int(row[-1]) for key, row in former_rows(KNOWN_SPILLS).items()}


def _spills_allowed(version: str = triton.__version__) -> int:
    """Bytes a thread: none with the Triton of the table, else as much as is known of the oldest."""
    if f"Triton {version}" in TABLE.with_suffix(".md").read_text(encoding="utf-8"):
        return 0
    return max(int(row[-1]) for row in former_rows(SPILLS).values())


def _check(rows: list[dict[str, Any]]) -> None:
    modules = {row["module"].removeprefix("fastfold.kernels.") for row in rows}
    assert modules == MODULES
    for row in rows:
        assert 0 < row["registers"] <= 255, row
        assert row["defect"] is None, row


@pytest.mark.long
def test_one_configuration_of_each_kernel_builds_without_spills() -> None:
    rows = _build(first_only=True)
    _check(rows)
    assert {row["name"].split()[0] for row in rows} == {variant.name.split()[0] for variant in all_variants()}


@pytest.mark.slow
def test_every_kernel_and_configuration_builds_without_spills() -> None:
    _check(_build(first_only=False))


@pytest.mark.slow
@pytest.mark.skipif(OLDEST not in os.environ, reason=f"{OLDEST} names no folder with Triton 3.6")
def test_nothing_else_spills_with_the_oldest_triton(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{os.environ[OLDEST]}{os.pathsep}{REPOSITORY}"
    program = REPOSITORY / "benchmarks" / "kernels" / "ahead_of_time.py"
    command = [sys.executable, str(program), "--out", str(tmp_path), "--known", str(SPILLS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "Triton 3.6" in (tmp_path / "ahead_of_time.md").read_text(encoding="utf-8")


def test_spills_are_allowed_only_with_another_triton_than_the_tables() -> None:
    assert _spills_allowed("3.9.0") == 0
    assert _spills_allowed("3.7.1") == _spills_allowed("3.6.0") > 0


def test_the_table_of_spills_holds_what_ships() -> None:
    """With the oldest Triton: configurations as they are now, and none that the newest spills with as well."""
    spills, table = former_rows(SPILLS), former_rows(TABLE)
    assert spills.keys() <= table.keys()
    for key, row in spills.items():
        assert row[2:5] == table[key][2:5], "build it again with Triton 3.6"
        assert int(row[-1]) > 0


def test_the_table_of_hopper_holds_configurations_that_ship() -> None:
    """Of both assemblers in older versions of Triton."""
    table = former_rows(TABLE)
    with SPILLS_HOPPER.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["triton"], row["assembler"]) for row in rows} == {
        ("3.6.0", "12.9"),
        ("3.7.1", "12.8"),
        ("3.7.1", "13.1"),
    }
    timed = {variant.name for variant in all_variants() if _timed(variant)}
    for row in rows:
        how = [row["blocks"], row["warps"], row["stages"]]
        assert how == table[row["kernel"], "sm_90"][2:5], "build it again by both assemblers"
        assert 0 < int(row["spill_bytes"]) <= (704 if row["kernel"] in timed else 176)


def test_only_what_is_known_may_spill() -> None:
    variant = KernelVariant("none", None, chip="sm_90")
    row = ["none", "sm_90", "BM=16", "8", "1", "255", "0", "16"]
    assert unknown_defect(variant, Needs(255, 0, 16), row, None) is not None
    assert unknown_defect(variant, Needs(255, 0, 16), row, row) is None
    assert unknown_defect(variant, Needs(255, 0, 24), row, row) is not None
    assert unknown_defect(variant, Needs(255, 0, 16), row, [*row[:4], "2", *row[5:]]) is not None
    assert unknown_defect(variant, Needs(255, 228 * 1024, 16), row, row) is not None


def test_the_table_of_results_holds_what_ships_and_nothing_spills() -> None:
    """Every kernel and configuration, with the blocks that it has now, for every architecture that it ships for."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    spilled = {f"{row['kernel']} {row['architecture']}": int(row["spill_bytes"]) for row in rows}
    assert {key: spills for key, spills in spilled.items() if spills} == _known_spills()
    variants = all_variants()
    timed = {f"{variant.name} {variant.chip}" for variant in variants if _timed(variant)}
    for key, spills in _known_spills().items():
        assert key in timed or key.endswith(("sm_86", "sm_89", "sm_120"))
        assert spills <= (704 if key in timed else 128)
    found = {
        (row["kernel"], row["architecture"]): (row["blocks"], row["warps"], row["stages"]) for row in rows
    }
    wanted = {}
    for variant in variants:
        blocks = " ".join(f"{name}={size}" for name, size in variant.blocks.items())
        for architecture in variant.architectures:
            how = (blocks, *map(str, variant.schedule))
            wanted[variant.name, f"sm_{architecture}"] = how
    assert len({variant.kernel.__name__ for variant in variants}) == 27
    assert len(variants) == 885
    assert tuple(2**power for power in range(4, 13)) == ROW_WIDTHS
    assert len(wanted) == sum(len(variant.architectures) for variant in variants), "two have one name"
    assert found == wanted, "run benchmarks/kernels/ahead_of_time.py --match the kernels that changed"


def _timed(variant: KernelVariant) -> bool:
    """Return True if the variant's configuration is an entry that was timed on a GPU of its class."""
    blocks = " ".join(f"{name}={size}" for name, size in variant.blocks.items())
    kernel = variant.kernel.__name__.removesuffix("_kernel")
    return (blocks, *variant.schedule) in timed_entries(kernel, variant.chip)


def test_every_entry_of_the_table_of_configurations_is_built() -> None:
    """No key is misspelled, and none is left over from a kernel that is gone."""
    built = {(s.kernel.__name__.removesuffix("_kernel"), s.chip, *_how(s)) for s in all_variants()}
    for kernel, chips in configurations().items():
        for chip, entries in chips.items():
            assert chip in CHIPS
            for key, config in entries.items():
                # Chunks of channels are no wider than the rows.
                blocks = {n: x for n, x in config.blocks.items() if n != "BK" or "_short" in key}
                how = (config.num_warps, config.num_stages)
                assert any(
                    b[:2] == (kernel, chip) and b[2:4] == how and blocks.items() <= dict(b[4]).items()
                    for b in built
                ), (kernel, chip, key)


def _how(variant: KernelVariant) -> tuple[Any, ...]:
    return *variant.schedule, tuple(variant.blocks.items())


def test_spills_and_too_much_shared_memory_are_defects() -> None:
    """Machine code for a data center's GPU has that GPU's memory, also by an entry that serves all GPUs."""
    for chip, architecture, size in (
        (FALLBACK, 86, 99),
        (FALLBACK, 80, 163),
        (FALLBACK, 90, 227),
        ("rtx", 120, 99),
    ):
        variant = KernelVariant("none", None, chip=chip)
        assert variant.defect(Needs(255, size * 1024, 0), architecture) is None
        assert variant.defect(Needs(255, size * 1024 + 1, 0), architecture) is not None
        assert variant.defect(Needs(255, 0, 8), architecture) is not None


@pytest.mark.skipif(not interpreted(), reason="needs a process with Triton's interpreter")
def test_building_in_the_interpreter_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="unset TRITON_INTERPRET"):
        build(KernelVariant("none", None), 90)
