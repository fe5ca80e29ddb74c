"""No kernel for Hopper changes a register while an asynchronous product still uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from benchmarks.kernels.async_products import early_changes
from benchmarks.kernels.machine_code import parse
from tests.conftest import REPOSITORY


def code(*lines: str) -> str:
    return "\n".join(f"        /*{16 * number:04x}*/  {line} ;" for number, line in enumerate(lines))


PRODUCT = "HGMMA.64x32x16.F32.BF16 R24, R56, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def test_what_follows_a_wait_may_use_everything() -> None:
    lines = ("MOV R56, R1", PRODUCT, "MOV R60, R1", WAIT, "MOV R56, R1", "FADD R24, R24, R25", "EXIT")
    assert early_changes(parse(code(*lines))) == []


@pytest.mark.parametrize(
    ("line", "registers"),
    [
        ("MOV R58, R1", "R58"),
        ("LDS.128 R52, [R2]", None),
        ("LDS.128 R53, [R2]", "R56"),
        ("IMAD.WIDE.U32 R58, R2, R3, RZ", "R58, R59"),
        ("FADD R1, R39, R2", "R39"),
        ("MOV R24, RZ", "R24"),
        ("STS [R2], R56", None),
        ("STS [R2], R30", "R30"),
    ],
)
def test_what_comes_before_the_wait_is_judged_by_its_registers(line: str, registers: str | None) -> None:
    found = early_changes(parse(code(PRODUCT, line, WAIT, "EXIT")))
    assert found == ([] if registers is None else [f"0x0010 {line}: {registers} in use"])


def test_a_loop_is_followed_back_to_its_beginning() -> None:
    """The product of one turn is waited for in the next, behind the instruction that spoils it."""
    turn = ("MOV R56, R1", WAIT, PRODUCT, "@P0 BRA 0x0", WAIT, "EXIT")
    assert early_changes(parse(code(*turn))) == ["0x0000 MOV R56, R1: R56 in use"]
    right = (WAIT, "MOV R56, R1", PRODUCT, "@P0 BRA 0x0", WAIT, "EXIT")
    assert early_changes(parse(code(*right))) == []


def test_a_wait_may_leave_the_last_products_on_their_way() -> None:
    other = "HGMMA.64x32x16.F32.BF16 R80, R60, gdesc[UR8], R80, gsb0"
    lines = (PRODUCT, other, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R56, R1", "MOV R60, R1", "EXIT")
    assert early_changes(parse(code(*lines))) == ["0x0040 MOV R60, R1: R60 in use"]


def _scan(match: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels.async_products", "--match", match]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_kernel_of_attention_keeps_the_rule() -> None:
    assert (
        _scan("attention_forward bf16 D=32 sm_90")
        == "1 kernels, 1 with asynchronous products, 0 change registers too early\n"
    )


@pytest.mark.slow
def test_every_kernel_keeps_the_rule() -> None:
    found = re.fullmatch(r"(\d+) kernels, (\d+) with asynchronous products, 0 change .*\n", _scan(""))
    assert found is not None
    assert int(found[1]) > 500
    assert int(found[2]) > 30
