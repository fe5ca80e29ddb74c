"""At 10,000 and 20,000 residues no kernel touches memory outside of its tensors, whose offsets pass 2^31."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernels.launches import cpu_passes_for_gpu, steps_of
from benchmarks.kernels.variants import all_variants
from fastfold import kernels
from fastfold.kernels.common.backend import VARIABLE, interpreted
from fastfold.kernels.ops.residual_update.op import fill_update
from fastfold.kernels.ops.residual_update.operands import UpdateOperands
from tests.helpers.address_checks import outside, visited
from tests.helpers.grid_launches import GridLaunch, launches_of

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs a process with Triton's interpreter")

DEPTHS = {10_000: 1_000, 20_000: 500}
"""Sequences by residues."""


def _steps(residues: int, depth: int) -> dict[str, list[GridLaunch]]:
    """Launches of every layer and operator, by its name."""
    with cpu_passes_for_gpu(), torch.device("meta"):
        return {name: launches_of(run) for name, run in steps_of(torch.bfloat16, residues, depth)}


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")


@pytest.mark.slow
def test_every_kernel_is_among_what_is_checked() -> None:
    found = {launch.name for launches in _steps(20, 5).values() for launch in launches}
    assert found == {variant.kernel.__name__ for variant in all_variants()}


def test_pieces_of_a_pair_tensor_of_20_000_residues() -> None:
    z = torch.empty(20_000, 20_000, 128, dtype=torch.bfloat16, device="meta")
    with cpu_passes_for_gpu():
        (launch,) = launches_of(lambda: kernels.residual_update(z, z))
    assert outside(launch) == []
    assert any("reads" in x for x in outside(launch, short=1))
    assert any("writes" in x for x in outside(launch, short=1))


@triton.jit
def _wraps_kernel(x, out, size, stride, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    tl.store(out + o_m, tl.load(x + o_m * stride, mask=o_m < size, other=0.0), mask=o_m < size)


def test_an_offset_that_wraps_around_is_noticed() -> None:
    x, out = (torch.empty(n, dtype=torch.float32, device="meta") for n in (2**33, 2**10))
    named = {"x": x, "out": out, "size": 2**10, "BM": 32}
    assert outside(GridLaunch(_wraps_kernel, (32,), named | {"stride": 2**20})) == []
    found = outside(GridLaunch(_wraps_kernel, (32,), named | {"stride": 2**23}))
    assert any("in front" in x for x in found)
    assert "_wraps_kernel: an index of 32 bits wraps around" in found
    found = outside(GridLaunch(_wraps_kernel, (33,), named | {"size": 2**10 + 1, "stride": 1}))
    assert found == ["_wraps_kernel: writes 4 bytes behind the end of out"]


def test_an_offset_that_wraps_around_to_the_beginning_is_noticed() -> None:
    """At the programs that run it is a multiple of 2^32, so that no address is outside."""
    x, out = (torch.empty(n, dtype=torch.float32, device="meta") for n in (2**33 + 1, 65))
    launch = GridLaunch(_wraps_kernel, (65,), {"x": x, "out": out, "size": 65, "stride": 2**27, "BM": 1})
    memory = visited(launch, programs=1)
    assert memory.found == ["_wraps_kernel: an index of 32 bits wraps around"]
    assert memory.extremes["x"] == (0, 4)


def test_of_launches_in_a_row_those_at_the_ends_of_each_tensor_are_kept() -> None:
    """Of blocks that move through one tensor forward and through another backward, and a last one that is shorter."""
    x, out = (torch.empty(50, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))

    def run() -> None:
        for first in range(0, 50, 8):
            rows = min(8, 50 - first)
            start = 50 - first - rows
            block = UpdateOperands(x[first : first + rows], *[None] * 4)
            fill_update(out[start : start + rows], block, "triton")

    with cpu_passes_for_gpu():
        launches = launches_of(run)
    assert [launch.offsets[0] for launch in launches] == [0, 5 * 64, 6 * 64]


@triton.jit
def _attention_moves_kernel(x, out, step, count, WIDE: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    o_x = tl.program_id(0) * 0
    if WIDE:
        o_x = o_x.to(tl.int64)
    for i_x in range(0, count):
        tl.store(out + tl.arange(0, 1), tl.load(x + o_x + tl.arange(0, 1)))
        if EVEN:
            o_x += step
        else:
            o_x += step * i_x


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"count": 2**10 + 1}, ["reads 4 bytes behind the end of x"]),
        ({"WIDE": False}, ["a loop moves on by an offset of 32 bits"]),
        ({"EVEN": False}, ["reads at addresses that move by unequal steps"]),
    ],
)
def test_the_last_round_follows_from_the_first_three(change: dict[str, int], said: list[str]) -> None:
    """Steps of 4 MiB through 4 GiB, of which three are made; what cannot be foreseen so is found."""
    x, out = (torch.empty(n, dtype=torch.float32, device="meta") for n in (2**30, 1))
    named = {"x": x, "out": out, "step": 2**20, "count": 2**10, "WIDE": True, "EVEN": True}
    found = outside(GridLaunch(_attention_moves_kernel, (1,), named | change))
    assert [line.removeprefix("_attention_moves_kernel: ") for line in found[:1]] == said


ATTENTION = ("msa_row_attention", "msa_column_attention")


def _small_attention() -> list[GridLaunch]:
    with cpu_passes_for_gpu(), torch.device("meta"):
        steps = steps_of(torch.bfloat16, 421, 389)
        launches = {name: launches_of(run) for name, run in steps if name in ATTENTION}
    return [
        one
        for name in ATTENTION
        for one in {x.name: x for x in launches[name]}.values()
        if "attention" in one.name
    ]


@pytest.mark.slow
def test_three_rounds_of_attention_touch_what_all_rounds_touch() -> None:
    """The same first and last byte of every tensor, at lengths that leave a rest."""
    launches = _small_attention()
    assert len(launches) == 9
    for launch in launches:
        short, whole = (visited(launch, 1, all_rounds=every) for every in (False, True))
        assert short.found == whole.found == [], launch.name
        assert short.extremes == whole.extremes, launch.name


@pytest.mark.slow
@pytest.mark.parametrize("residues", DEPTHS)
def test_a_row_without_keys_reads_no_further(residues: int) -> None:
    """The loops over all values, or gradients, of a row whose keys are all masked."""
    z = torch.empty(1, 2, residues, 4, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    mask = torch.empty(1, 2, residues, dtype=torch.bfloat16, device="meta")
    with cpu_passes_for_gpu():
        launches = launches_of(lambda: kernels.attention(z, z, z, mask=mask).sum().backward())
    by_name = {launch.name: launch for launch in launches}
    for name in ("attention_forward_kernel", "attention_grad_kv_kernel"):
        loaded = {"x.hidden": -torch.inf, "x.lse": torch.inf}
        masked, used = (visited(by_name[name], 1, loaded=values) for values in (loaded, {}))
        assert masked.found == []
        assert masked.accesses > used.accesses + residues // 128, "the loop did not run"


@pytest.mark.slow
@pytest.mark.parametrize("residues", DEPTHS)
def test_every_kernel_at_this_length(residues: int) -> None:
    """Programs at the ends of the grid and between; what steps have in common once.

    See :mod:`tests.helpers.address_checks` and :mod:`tests.helpers.grid_launches` for why no other program, round or
    launch reaches further.
    """
    checked = set()
    for step, launches in _steps(residues, DEPTHS[residues]).items():
        assert launches, step
        for launch in launches:
            if (launch.key, launch.offsets) not in checked:
                checked.add((launch.key, launch.offsets))
                assert outside(launch, programs=2 if "attention" in launch.name else 1) == [], step
