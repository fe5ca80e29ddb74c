"""Blocks in threads give what they give one after the other, and nothing is lost if one fails."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold import kernels
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.cpu import block_threads
from fastfold.kernels.cpu import products as cpu_products
from fastfold.kernels.cpu.block_threads import (
    for_blocks,
    for_positions,
    forward_positions,
    on_one_core,
    sum_blocks,
    threads_of,
)
from fastfold.kernels.cpu.linear import reduced_products
from fastfold.kernels.cpu.products import exact_products, onednn_multiplies
from fastfold.kernels.ops.gated_attention import eager as attention_rows
from fastfold.kernels.ops.outer_product_mean.eager import DEEP
from tests.kernels.test_operators import case_of


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _makers(count: int, **options: Any) -> list[str]:
    """Names of the threads that made each block, of blocks that wait for as many threads as there are."""
    names = [""] * count
    together = threading.Barrier(torch.get_num_threads())

    def work(scratch: Scratch, index: int) -> None:
        if options.get("wait", True) and index < together.parties:
            together.wait(10)
        names[index] = threading.current_thread().name

    for_blocks(
        work, ((i,) for i in range(count)), Scratch(), **{k: v for k, v in options.items() if k != "wait"}
    )
    return names


def test_every_block_is_made_once_and_by_as_many_threads_as_there_are(threads: int) -> None:
    names = _makers(7 * threads)
    assert all(name.startswith("fastfold-block") for name in names)
    assert len(set(names)) == threads


def test_too_few_blocks_one_lane_and_other_devices_stay_in_the_caller_s_thread(threads: int) -> None:
    own = {threading.current_thread().name}
    assert set(_makers(threads - 1, wait=False)) == own
    assert set(_makers(2 * threads, wait=False, threads=1)) == own
    found: list[str] = []
    for_blocks(lambda *_: found.append(threading.current_thread().name), [()] * 9, Scratch("meta"))
    assert set(found) == own
    assert _makers(0, wait=False) == []


def test_a_block_s_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer blocks at once than cores, several cores work on each block; the caller's number stays as it was."""
    before = torch.get_num_threads()
    monkeypatch.setattr(block_threads, "MAX_THREADS", 2)
    torch.set_num_threads(5)
    try:
        found: list[int] = []
        for_blocks(lambda *_: found.append(torch.get_num_threads()), [()] * 9, Scratch(), threads=2)
        assert found == [2] * 9
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("inference", [True, False])
def test_work_on_one_core_leaves_the_caller_s_number_of_cores(threads: int, inference: bool) -> None:
    weight = torch.ones(3, requires_grad=True)

    def work() -> tuple[Tensor, int]:
        assert on_one_core(torch.get_num_threads) == 1
        return 2 * weight, torch.get_num_threads()

    with torch.inference_mode(inference):
        doubled, number = on_one_core(work)
    assert number == 1
    assert torch.get_num_threads() == threads
    assert doubled.tolist() == [2.0] * 3
    assert not doubled.requires_grad
    assert doubled.is_inference() is inference


def test_works_on_one_core_may_wait_for_each_other_and_raise_their_errors(threads: int) -> None:
    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda _: on_one_core(lambda: together.wait(10)), range(2)))
    assert sorted(met) == [0, 1]

    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        on_one_core(fail)
    assert torch.get_num_threads() == threads


def test_lanes_have_buffers_of_their_own_and_keep_them(threads: int) -> None:
    scratch, found = Scratch(dtype=torch.float64), []
    together = threading.Barrier(threads)

    def work(own: Scratch) -> None:
        together.wait(10)
        buffer = own("x", 3)
        assert buffer.dtype == torch.float64
        found.append(buffer.data_ptr())

    for _ in range(2):
        for_blocks(work, [()] * threads, scratch.of(torch.empty(0, dtype=torch.float64)))
    assert len(set(found)) == threads


@pytest.mark.parametrize("inference", [True, False])
def test_a_lane_records_no_gradients_and_writes_what_inference_made(threads: int, inference: bool) -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.inference_mode(inference):
        out = torch.zeros(8, 3)
        for_blocks(lambda _, row: row.copy_(weight * 2), ((row,) for row in out), Scratch())
        assert torch.equal(out, torch.full((8, 3), 2.0))
        assert not out.requires_grad
        assert out.is_inference() is inference


@pytest.mark.parametrize("from_blocks", [True, False])
def test_an_error_comes_out_and_no_block_is_begun_after_it(threads: int, from_blocks: bool) -> None:
    begun: list[int] = []

    def blocks() -> Iterator[tuple[int]]:
        for i in range(1000):
            if from_blocks and i == 20:
                raise KeyError("block 20")
            yield (i,)

    def work(scratch: Scratch, index: int) -> None:
        begun.append(index)
        if not from_blocks and index == 20:
            raise KeyError("block 20")
        time.sleep(1e-3)

    with pytest.raises(KeyError, match="block 20"):
        for_blocks(work, blocks(), Scratch())
    assert len(begun) < 40
    count = len(begun)
    time.sleep(0.05)
    assert len(begun) == count
    assert len(set(_makers(7 * threads))) == threads  # and threads go on


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.adds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.adds += func is torch.ops.aten.add_.Tensor
        return func(*args, **(kwargs or {}))


def test_who_counts_operators_counts_those_of_all_blocks(threads: int) -> None:
    x = torch.zeros(100)
    with _Counting() as mode:
        for_blocks(lambda _, part: part.add_(1), ((part,) for part in x.split(10)), Scratch())
    assert mode.adds == 10
    assert x.eq(1).all()


def test_blocks_within_a_block_are_made_one_after_the_other(threads: int) -> None:
    inner: list[bool] = []

    def work(scratch: Scratch) -> None:
        name = threading.current_thread().name
        for_blocks(lambda *_: inner.append(threading.current_thread().name == name), [()] * 5, scratch)

    for_blocks(work, [()] * 4, Scratch())
    assert inner == [True] * 20


def test_a_forked_process_starts_threads_of_its_own(threads: int) -> None:
    assert len(set(_makers(7 * threads))) == threads
    child = os.fork()
    if child == 0:
        os._exit(0 if len(set(_makers(7 * threads))) == threads else 1)
    for _ in range(300):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked process waits for threads that it does not have")
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_library_does_not_change_while_blocks_are_made(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the calling thread nor for those of the blocks, which have their caller's."""
    monkeypatch.setattr(cpu_products, "multiplied_by_onednn", lambda: True)
    found: list[tuple[str, bool]] = []
    with exact_products(torch.device("cpu")):
        assert onednn_multiplies()
        for_blocks(
            lambda *_: found.append((torch.get_float32_matmul_precision(), onednn_multiplies())),
            [()] * 9,
            Scratch(),
        )
        assert onednn_multiplies()
        assert torch.get_float32_matmul_precision() == "highest"
    assert found == [("highest", True)] * 9


def _sum(count: int, together: bool = True) -> tuple[list[Any], list[str]]:
    """Sums of numbers that depend on the order of addition, and the names of the threads that added."""
    totals: list[Any] = [torch.zeros(()), (None, torch.zeros(2))]
    names, start = [""] * count, threading.Barrier(torch.get_num_threads())

    def work(scratch: Scratch, totals: list[Any], index: int) -> None:
        if together and index < start.parties <= count:
            start.wait(10)
        totals[0] += 1 / (index + 3)
        totals[1][1].add_(torch.tensor([1.0, index]))
        names[index] = threading.current_thread().name

    sum_blocks(work, ((i,) for i in range(count)), Scratch(), totals)
    return totals, names


def test_sums_of_threads_hold_every_block_once_with_the_same_bits(threads: int) -> None:
    totals, names = _sum(100)
    assert totals[1][0] is None
    assert totals[1][1].tolist() == [100, 99 * 50]
    assert float(totals[0]) == pytest.approx(sum(1 / (i + 3) for i in range(100)), rel=1e-6)
    for first in range(threads):
        assert len(set(names[first::threads])) == 1
    assert len(set(names)) == threads
    for _ in range(20):
        assert torch.equal(_sum(100)[0][0], totals[0])


def test_too_few_blocks_are_summed_in_the_caller_s_thread(threads: int) -> None:
    totals, names = _sum(threads - 1)
    assert set(names) == {threading.current_thread().name}
    assert totals[1][1][0] == threads - 1


def test_large_totals_are_not_copied_for_each_thread(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_threads, "_OWN_TOTALS", 2)
    totals, names = _sum(2 * threads, together=False)
    assert set(names) == {threading.current_thread().name}
    assert totals[1][1][0] == 2 * threads


def test_an_error_ends_the_sums_of_all_threads(threads: int) -> None:
    begun: list[int] = []

    def work(scratch: Scratch, totals: list[Tensor], index: int) -> None:
        begun.append(index)
        if index == 20:
            raise KeyError("block 20")
        time.sleep(1e-3)

    with pytest.raises(KeyError, match="block 20"):
        sum_blocks(work, ((i,) for i in range(1000)), Scratch(), [torch.zeros(2)])
    count = len(begun)
    assert count < 200
    time.sleep(0.05)
    assert len(begun) == count


LARGE = {
    "gated_attention": 700,
    "layer_norm": 2500,
    "pair_bias": 50,
    "transition": 2500,
    "triangle_factors": 50,
    "triangle_multiplication": 50,
    "triangle_update": 50,
}
"""Lengths with which the cases of operators have several blocks."""


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Tensor]], Tensor]:
    """Call something with a number of threads, after which blocks were divided if there are two."""
    divided: list[Scratch] = []
    of_thread = Scratch.of_thread

    def watched(self: Scratch, index: int) -> Scratch:
        divided.append(self)
        return of_thread(self, index)

    monkeypatch.setattr(Scratch, "of_thread", watched)

    def run(threads: int, operator: Callable[[], Tensor]) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        divided.clear()
        try:
            with torch.no_grad():
                found = operator()
        finally:
            torch.set_num_threads(before)
        assert bool(divided) == (threads > 1)
        return found

    return run


@pytest.mark.parametrize("products", [None, "bf16", "int8"])
@pytest.mark.parametrize("name", LARGE)
def test_an_operator_gives_the_same_bits_in_threads(
    name: str,
    products: Any,
    on_threads: Callable[[int, Callable[[], Tensor]], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (block_threads, attention_rows):  # so that few positions in bfloat16 are several blocks
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1)
    case = case_of(name, LARGE[name])
    inputs = {
        k: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in case.inputs.items()
    }
    with reduced_products(products) if products else contextlib.nullcontext():
        operator = partial(case.operator, **inputs, backend="torch")
        assert torch.equal(on_threads(2, operator), on_threads(1, operator))


@pytest.mark.parametrize("name", sorted((LARGE | {"outer_product_mean": 300}).items()))
def test_threads_sum_the_gradients_of_one(
    name: tuple[str, int], on_threads: Callable[[int, Callable[[], Tensor]], Tensor]
) -> None:
    """In float64, with a gradient of the result that differs at each position."""
    case = case_of(*name)
    leaves = {
        k: x.double().requires_grad_(k not in case.constants)
        for k, x in case.inputs.items()
        if isinstance(x, Tensor)
    }
    with torch.enable_grad():
        out = case.operator(**case.inputs | leaves, backend="torch")
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    wanted = [x for x in leaves.values() if x.requires_grad]

    def gradients() -> Tensor:
        found = torch.autograd.grad(out, wanted, grad, retain_graph=True)
        return torch.cat([x.flatten() / x.norm() for x in found])

    both, alone = on_threads(2, gradients), on_threads(1, gradients)
    assert float((both - alone).abs().max()) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("products", [None, "bf16", "int8"])
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("sequences", [50, DEEP])
def test_an_outer_product_mean_gives_the_same_bits_in_threads(
    sequences: int,
    onednn: bool,
    products: Any,
    on_threads: Callable[[int, Callable[[], Tensor]], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever library makes its products: threads have their own rule for that."""
    monkeypatch.setattr(cpu_products, "multiplied_by_onednn", lambda: onednn)
    torch.manual_seed(0)
    left, right = torch.randn(2, sequences, 200, 8)
    left_mask, right_mask = torch.randint(2, (2, sequences, 200)).float()
    inputs = (left, right, left_mask, right_mask, torch.randn(16, 64), torch.randn(16))
    operator = partial(kernels.outer_product_mean, *inputs, backend="torch")
    exact = operator()
    with (
        reduced_products(products) if products else contextlib.nullcontext(),
        exact_products(torch.device("cpu")),
    ):
        alone, both = on_threads(1, operator), on_threads(2, operator)
    assert torch.equal(both, alone)
    error = float((alone - exact).norm() / exact.norm())
    assert (1e-3 < error < 3e-2) if products else error < 1e-6


@pytest.mark.parametrize(
    ("channels", "positions", "count", "size"),
    [
        (64, 10_000, 1, 2500),
        (64, 10_000, 2, 1250),
        (128, 100_000, 2, 2048),
        (512, 100_000, 1, 1024),
        (64, 100, 1, 1024),
        (2048, 100_000, 1, 512),
        (64, 200_000, 64, 4096),
    ],
)
def test_narrow_channels_get_few_large_blocks_of_a_forward_pass(
    channels: int, positions: int, count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert forward_positions(channels, positions) == size


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [2, 200])
def test_positions_are_numbered_in_row_major_order(rows: int, transposed: bool) -> None:
    """Of few positions in one block and of many in several, whether or not a view has them in a row."""
    x = torch.arange(rows * 9.0).view(rows, 9, 1)
    x = x.transpose(0, 1) if transposed else x
    order, sizes = torch.zeros(rows * 9), list[int]()

    def work(scratch: Scratch, positions: slice, b_x: Tensor, b_out: Tensor) -> None:
        sizes.append(len(b_x))
        order[positions] = b_x[:, 0]
        torch.mul(b_x, 2, out=b_out)

    out = torch.empty_like(x)
    for_positions(work, 1024, Scratch(), x, out)
    assert torch.equal(order, x.flatten())
    assert torch.equal(out, 2 * x)
    assert (len(sizes) == 1) == (rows == 2 and not transposed)
    assert max(sizes) <= 1024


@pytest.mark.parametrize(
    ("channels", "positions", "size"),
    [
        (512, 100_000, 2048),
        (512, 8_192, 8_192),
        (512, 8_193, 2048),
        (16, 1_000_000, 4096),
        (1024, 4_096, 4_096),
        (1024, 4_097, 1024),
    ],
)
def test_fast_products_get_larger_blocks(
    channels: int, positions: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert forward_positions(channels, positions, torch.bfloat16) == size


def test_few_positions_in_bfloat16_are_not_shared_among_threads() -> None:
    assert threads_of(4096, torch.bfloat16) == 1
    assert threads_of(4097, torch.bfloat16) == threads_of(10, torch.float32) == block_threads.MAX_THREADS
