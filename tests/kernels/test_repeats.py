"""How often warps make the same product: small pieces of intermediate code, and one kernel compiled both ways."""

from __future__ import annotations

import os

import pytest

from benchmarks.kernels.repeats import repeats_of
from tests.helpers.compiler import run_program

LAYOUTS = """
#blocked = #ttg.blocked<{sizePerThread = [2, 2], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], order = [1, 0]}>
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 2], instrShape = [16, 8]}>
#mma1 = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = [16, 32, 16]}>
"""


def _dot(m: int, n: int, k: int, layout: str, indent: int = 4) -> str:
    operands = [
        f"tensor<{size}xbf16, #ttg.dot_op<{{opIdx = {i}, parent = {layout}, kWidth = 2}}>>"
        for i, size in enumerate((f"{m}x{k}", f"{k}x{n}"))
    ]
    text = f"%d = tt.dot %a, %b, %c, inputPrecision = tf32 : {' * '.join(operands)}"
    return f"{' ' * indent}{text} -> tensor<{m}x{n}xf32, {layout}> loc(#loc1)\n"


def _wgmma(m: int, n: int, k: int) -> str:
    return (
        f"    %d = ttng.warp_group_dot %a, %b, %c {{inputPrecision = 0 : i32}} : !ttg.memdesc<{m}x{k}xbf16, #shared, "
        f"#smem> * !ttg.memdesc<{k}x{n}xbf16, #shared, #smem> -> tensor<{m}x{n}xf32, #mma1> loc(#loc1)\n"
    )


@pytest.mark.parametrize(
    ("m", "n", "repeats"), [(64, 16, 1), (128, 128, 1), (32, 16, 2), (64, 8, 2), (16, 8, 8)]
)
def test_blocks_with_fewer_tiles_than_warps(m: int, n: int, repeats: int) -> None:
    assert repeats_of(LAYOUTS + _dot(m, n, 32, "#mma")) == repeats


@pytest.mark.parametrize(("m", "repeats"), [(128, 1), (64, 2), (256, 1)])
def test_warp_groups_of_the_same_rows(m: int, repeats: int) -> None:
    assert repeats_of(LAYOUTS + _wgmma(m, 32, 64)) == repeats


@pytest.mark.parametrize(("m", "n", "repeats"), [(16, 32, 1), (8, 32, 2), (16, 16, 2), (32, 64, 1)])
def test_threads_that_make_fused_multiply_adds_of_the_same_numbers(m: int, n: int, repeats: int) -> None:
    assert repeats_of(LAYOUTS + _dot(m, n, 32, "#blocked")) == repeats


def test_the_fifth_generation_makes_each_product_once() -> None:
    line = "    ttng.tc_gen5_mma %a, %b, %d[%t], %u, %p : !ttg.memdesc<64x32xf32, #tmem>, !ttg.memdesc<32x16xf32, #s>\n"
    assert repeats_of(LAYOUTS + line) == 1
    # beside 64 x 32 x 16 products made once, 32 x 16 x 64 made twice
    assert repeats_of(LAYOUTS + line + _dot(32, 16, 64, "#mma")) == 1.5


def test_products_are_those_of_the_biggest_innermost_loop() -> None:
    code = _dot(64, 16, 512, "#mma")
    code += "    %x:2 = scf.for %i = %0 to %1 step %2 iter_args(%y = %z) -> (i32)  : i32 {\n"
    code += _dot(64, 16, 128, "#mma", 6)
    code += "      %w = scf.while (%v = %u) : (i32) -> i32 {\n      } do {\n"
    code += _dot(32, 16, 64, "#mma", 8) + _dot(64, 16, 32, "#mma", 8)
    code += "      } loc(#loc)\n    } loc(#loc)\n"
    code += "    scf.for %i = %0 to %1 step %2  : i32 {\n" + _dot(16, 8, 16, "#mma", 6) + "    } loc(#loc)\n"
    assert repeats_of(LAYOUTS + code) == 1.5


def test_without_products_nothing_repeats() -> None:
    assert repeats_of(LAYOUTS) == 1


@pytest.mark.parametrize("layout", ["#linear", "#mma7"])
def test_an_unknown_layout_is_refused(layout: str) -> None:
    with pytest.raises(ValueError, match="unknown form or layout"):
        repeats_of(LAYOUTS + _dot(64, 16, 32, layout))


# One block of 16 x 16 for 2 warps has two tiles of 16 x 8, for 8 warps each of them is made four times.
COMPILE = """
import json
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benchmarks.kernels.machine_code import listing, product_loops
from benchmarks.kernels.repeats import repeats_of

@triton.jit
def products(p, rounds):
    rows = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    out = tl.zeros((16, 16), tl.float32)
    for i in range(rounds):
        x = tl.load(p + i * 256 + rows)
        out = tl.dot(x, x, out)
    tl.store(p + rows, out.to(tl.bfloat16))

for warps in (2, 8):
    source = ASTSource(products, {"p": "*bf16", "rounds": "i32"}, {})
    made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": warps, "num_stages": 1})
    main = max(product_loops(listing(made)), key=lambda x: x.products)
    print(json.dumps([warps, repeats_of(made.asm["ttgir"]), main.products * warps]))
"""


def test_repeats_are_those_of_the_machine_code(tmp_path: object) -> None:
    """Whatever the assembler puts into one round, the products of a program grow by the repeats."""
    script = os.path.join(str(tmp_path), "products.py")  # Triton reads a kernel's source from its file
    with open(script, "w", encoding="utf-8") as file:
        file.write(COMPILE)
    printed = run_program("import runpy; runpy.run_path(*arguments)", script)
    found = {warps: (repeats, made) for warps, repeats, made in printed}
    assert {warps: repeats for warps, (repeats, _) in found.items()} == {2: 1.0, 8: 4.0}
    assert all(made % (16 * 16 * 16 * repeats) == 0 for repeats, made in found.values())
    assert found[8][1] == 4 * found[2][1]
