"""The outer product mean in chunks equals its definition, and is chosen where it is predicted faster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold import kernels
from fastfold.errors import ConfigError
from fastfold.inference.planning.memory_model import CUDA_BLOCK, MAX_BLOCK_CUDA
from fastfold.kernels import reference
from fastfold.kernels.common.cost import OPERATOR_COSTS
from fastfold.kernels.common.shared_masks import shared_masks
from fastfold.kernels.ops.outer_product_mean import chunk_choice, chunks, triton_bwd, triton_fwd
from fastfold.kernels.ops.outer_product_mean.chunk_choice import (
    OuterProductSizes,
    predict_backward,
    predict_forward,
)
from fastfold.kernels.ops.outer_product_mean.eager import OuterProductParams
from fastfold.parallel.planner.recorder import Recorder
from tests.helpers.kernel_checks import DEVICE, check_against_definition, relative_error
from tests.helpers.outer_products import added_to_residual, with_strides_and_residual

MASKS = {"left_mask", "right_mask"}
NAMES = ("left", "right", "weight", "bias")


@pytest.fixture(autouse=True)
def _chunks_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Request chunks, refuse Triton's kernels, and fill new memory with NaN."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a Triton kernel was called")

    monkeypatch.setenv(chunk_choice.VARIABLE, "1")
    monkeypatch.setattr(triton_fwd, "forward", refuse)
    monkeypatch.setattr(triton_bwd, "backward", refuse)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def _inputs(
    sequences: int, rows: int, columns: int, c: int = 4, batch: tuple[int, ...] = ()
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sequences + rows)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    def mask(*size: int) -> Tensor:
        return (torch.rand(*size, generator=generator) > 0.3).double()

    return {
        "left": randn(*batch, sequences, rows, c),
        "right": randn(*batch, sequences, columns, c),
        "left_mask": mask(*batch, sequences, rows),
        "right_mask": mask(*batch, sequences, columns),
        "weight": randn(12, c * c) / c,
        "bias": randn(12),
    }


def _set_rows(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, c: int, element_size: int) -> None:
    """Let products of so many rows be a chunk, whose columns are padded."""
    width = -(-columns // 8) * 8
    monkeypatch.setattr(chunk_choice, "CHUNK_BYTES", rows * width * c * c * element_size)


def _run(**inputs: Tensor) -> Tensor:
    return kernels.outer_product_mean(**inputs, backend="triton")


def _set_joined(monkeypatch: pytest.MonkeyPatch, joined: bool) -> None:
    """Let chunks of rows serve both sides' gradients, or chunks of columns follow."""
    for module in (chunks, chunk_choice):
        monkeypatch.setattr(module, "joins_sides", lambda sizes: joined)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (9, 5, 16), (33, 11, 9)])
def test_output_and_gradients(
    shape: tuple[int, int, int], dtype: torch.dtype, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several chunks, the last one smaller, with columns that cuBLAS multiplies fast and others."""
    _set_joined(monkeypatch, joined)
    _set_rows(monkeypatch, 2, shape[2], 4, dtype.itemsize)
    check_against_definition(_run, reference.outer_product_mean, _inputs(*shape), dtype, MASKS)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_the_long_sum_do_not_matter(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "parts_of_sum", lambda *sizes: parts)
    check_against_definition(_run, reference.outer_product_mean, _inputs(6, 5, 9), torch.float32, MASKS)


def test_residual_batches_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_rows(monkeypatch, 3, 4, 4, 4)
    inputs = with_strides_and_residual(_inputs(3, 5, 4, batch=(2, 1)))
    check_against_definition(_run, added_to_residual, inputs, torch.float32, MASKS)


def test_rows_in_blocks_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch, with the right side whole and in parts."""
    _set_rows(monkeypatch, 2, 9, 4, 4)
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 5, 9, batch=(2,)).items()}
    fixed = (inputs["right_mask"], inputs["weight"], inputs["bias"])
    expected = reference.outer_product_mean(**inputs)
    for sizes in (3, 2):
        pair = torch.randn(2, 5, 9, 12, device=DEVICE)
        sum_of_both = pair + expected
        updates = kernels.OuterProductRows(iter(inputs["right"].split(sizes, 1)), *fixed, backend="triton")
        for block in (slice(0, 2), slice(2, 5)):
            rows, left = pair[:, block], inputs["left"][:, :, block]
            assert updates.write(rows, left, inputs["left_mask"][:, :, block], rows) is rows
        assert relative_error(pair, sum_of_both) < 1e-6


@pytest.mark.parametrize("wanted", NAMES)
def test_one_gradient_alone(wanted: str) -> None:
    inputs = _inputs(3, 5, 4)
    constants = set(inputs) - {wanted}
    check_against_definition(_run, reference.outer_product_mean, inputs, torch.float32, constants)


def test_pairs_without_common_sequences_and_empty_results() -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 4, 4).items()}
    inputs["left_mask"].zero_()
    out = _run(**inputs)
    assert relative_error(out, (inputs["bias"] / 1e-3).expand_as(out)) < 1e-6
    x = OuterProductParams(**inputs)
    nothing = x._replace(left=x.left[:, :0], left_mask=x.left_mask[:, :0])
    assert _run(**nothing._asdict()).shape == (0, 4, 12)
    assert not any(grad.any() for grad in chunks.backward(out[:0], nothing, 1e-3, NAMES))


def test_factors_are_computed_once_where_calls_share_masks_and_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(4, 5, 3).items()}
    calls: list[Tensor] = []
    counts_of = chunks.counts_of
    monkeypatch.setattr(chunks, "counts_of", lambda a, b: calls.append(a) or counts_of(a, b))

    def run(eps: float) -> Tensor:
        return kernels.outer_product_mean(**inputs, eps=eps, backend="triton")

    expected = [run(eps) for eps in (0.5, 0.5, 2.0)]
    calls.clear()
    with shared_masks():
        found = [run(eps) for eps in (0.5, 0.5, 2.0)]
    assert len(calls) == 2
    assert all(map(torch.equal, found, expected))


class _Launches(TorchDispatchMode):
    """Counts operators of PyTorch that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += not (function.is_view or function is torch.ops.aten._unsafe_view.default)
        return function(*arguments, **(options or {}))


def _launches(call: Callable[[], object]) -> int:
    with _Launches() as launches:
        call()
    return launches.count


def test_launches_are_those_of_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that a second chunk of 16 rows or columns adds, and those that a second group of chunks adds."""
    by_triton: list[Tensor] = []
    monkeypatch.setattr(chunks, "write_update", lambda out, operands: by_triton.append(out))
    monkeypatch.setattr(chunks, "parts_of_sum", lambda *sizes: 2)
    torch.use_deterministic_algorithms(False)
    _set_rows(monkeypatch, 16, 16, 4, 4)

    def forward(rows: int) -> int:
        x = OuterProductParams(*(x.float() for x in _inputs(3, rows, 16).values()))
        side, out = chunks.masked_by_channels(x.right, x.right_mask), torch.zeros(rows, 16, 12)
        shared = triton_fwd.RightSide(side, x.right_mask, x.weight, x.bias)
        return _launches(lambda: chunks.forward(shared, 1e-3, out, x.left, x.left_mask, out))

    def backward(rows: int, columns: int, *needed: str) -> int:
        x = OuterProductParams(*(x.float() for x in _inputs(3, rows, columns).values()))
        grad = torch.zeros(rows, columns, 12)
        return _launches(lambda: chunks.backward(grad, x, 1e-3, needed))

    def differences(count: Callable[[int], int]) -> tuple[int, int]:
        chunk, whole = count(32) - count(16), chunk_choice.GROUP * 16
        return chunk, count(whole + 16) - count(whole) - chunk

    own, of_group, of_triton = chunk_choice.FORWARD_LAUNCHES
    assert differences(forward) == (own, of_group)
    assert (
        len(by_triton) == 5 * of_triton
    )  # of two calls with one group, one with a whole group, one with two
    of_rows = differences(lambda n: backward(n, 16, "left", "weight", "bias"))
    assert of_rows == chunk_choice.ROW_LAUNCHES[:2]
    assert differences(lambda n: backward(16, n, "right")) == chunk_choice.COLUMN_LAUNCHES[:2]
    _set_joined(monkeypatch, True)
    of_both = differences(lambda n: backward(n, 16, *NAMES))
    more = tuple(both - rows for both, rows in zip(of_both, of_rows, strict=True))
    assert more == chunk_choice.JOIN_LAUNCHES[:2]


def _peak(call: Callable[[], object], inputs: Iterable[Tensor]) -> float:
    """Return the maximum number of bytes that exist at a time, without the inputs."""
    with Recorder(nn.Identity()) as recorder:
        recorder.leave_out(inputs)
        call()
    return recorder.result().peak


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("shape", [(16, 64, 64, 16), (4, 96, 40, 16), (64, 40, 96, 8)])
def test_buffers_are_those_of_the_cost(
    shape: tuple[int, int, int, int], joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of both passes beyond inputs and results: at least those that are used, and at most a tenth more."""
    _set_joined(monkeypatch, joined)
    _, rows, columns, c = shape
    _set_rows(monkeypatch, 4, columns, c, 4)
    x = OuterProductParams(*(x.float() for x in _inputs(*shape).values()))
    grad = torch.zeros(rows, columns, 12)
    call = {"sides": x[:2], "masks": x[2:4], "parameters": x[4:], "backend": "triton"}

    monkeypatch.setattr(chunks, "write_update", lambda out, operands: None)
    peak = _peak(lambda: _run(**x._asdict()), x) - grad.nbytes
    workspace = OPERATOR_COSTS["outer_product_mean"](call).workspace
    assert peak <= workspace <= 1.1 * peak
    peak = _peak(lambda: chunks.backward(grad, x, 1e-3, NAMES), [*x, grad])
    peak -= sum(y.nbytes for y in (x.left, x.right, x.weight, x.bias))
    workspace = OPERATOR_COSTS["outer_product_mean_backward"](call).workspace
    assert peak <= workspace <= 1.1 * peak


def test_costs_count_buffers_where_a_gpu_may_compute_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data belong to plans for any GPU; Triton's kernels and PyTorch's tiles have no buffers."""
    monkeypatch.delenv(chunk_choice.VARIABLE)
    sizes = OuterProductSizes(128, 1024, 1024, 32, 128)

    def buffers(x: Tensor, backend: str, sizes: OuterProductSizes = sizes) -> int:
        return chunk_choice.buffers_of(x, sizes, backend, backward=True)

    meta, here = (torch.empty(2, 3, 32, dtype=torch.bfloat16, device=device) for device in ("meta", "cpu"))
    assert buffers(meta, "torch") == chunk_choice.backward_buffers(sizes, 2) > 60 << 20
    assert buffers(meta.float(), "torch") == buffers(here, "torch") == buffers(here, "triton") == 0
    assert buffers(meta, "torch", sizes._replace(rows=64, columns=64)) == 0
    monkeypatch.setattr(chunk_choice, "chip_class", lambda device: "sm_90")
    assert buffers(here, "triton") == buffers(meta, "torch")
    monkeypatch.setenv(chunk_choice.VARIABLE, "0")
    assert buffers(meta, "torch") == 0


def test_buffers_fit_into_the_memory_that_plans_reserve() -> None:
    """A GPU's reserve for blocks of attention, which is free during an outer product mean, in bfloat16."""
    for columns in (64, 256, 1024, 4096, 20_000):
        rows = min(columns, MAX_BLOCK_CUDA // (columns * 128))  # of a block of a fold
        sizes = OuterProductSizes(512, rows, columns, 32, 128)
        assert chunk_choice.forward_buffers(sizes, 2) <= 0.5 * 2 * CUDA_BLOCK, columns


def test_parts_divide_the_channels_and_fill_the_processors() -> None:
    assert chunk_choice.parts_of_sum(512, 128, 32) == 32
    assert chunk_choice.parts_of_sum(512, 516, 32) == 4
    assert chunk_choice.parts_of_sum(512, 5120, 32) == 1
    assert chunk_choice.parts_of_sum(2, 3, 6) == 2


TABLE = Path(__file__).parents[3] / "benchmarks" / "results" / "kernel_choices.md"


def test_the_table_has_the_predictions() -> None:
    """A row has sequences, residues, and times of both passes: in chunks on device and host, and the kernels'."""
    rows = re.findall(r"^\| (\d[\d,]*) . (\d[\d,]*) \| ([^\n]*) \|$", TABLE.read_text(), re.MULTILINE)
    assert len(rows) >= 8
    for sequences, residues, rest in rows:
        n = int(residues.replace(",", ""))
        sizes = OuterProductSizes(int(sequences.replace(",", "")), n, n, 32, 128)
        cells = [cell.strip() for cell in rest.split("|")]
        for offset, seconds in ((0, predict_forward(sizes)), (4, predict_backward(sizes))):
            written = [float(cell) for cell in cells[offset : offset + 3]]
            assert written == pytest.approx([1e3 * x for x in seconds], rel=0.02, abs=0.006)
            assert cells[offset + 3] == ("chunks" if seconds.are_best_in_chunks(n * n) else "kernels")


def test_predictions_by_hand() -> None:
    """At 1,024 residues and 128 sequences: 275 GFLOP a product, 2.15 GB of products, 64 chunks in 16 groups."""
    sizes = OuterProductSizes(128, 1024, 1024, 32, 128)
    product, products, pair = 274.88e9 / 700e12, 2.1475e9, 268.4e6
    forward = predict_forward(sizes)
    assert forward.device == pytest.approx(2 * product + 4 * pair / 3e12 + (64 * 2 + 16) * 2e-6, rel=1e-3)
    assert forward.host == pytest.approx(64 * 2 * 5e-6 + 16 * 20e-6)
    assert forward.kernels == pytest.approx(1.91e-3, rel=1e-2)
    backward = predict_backward(sizes)
    sums = 2 * (1024 * 2**17 + 32 * 1024 * 32 * 128) * 2 / 5.5e12
    grads = pair * (4 / 3e12 + 1 / 5.5e12)
    joining = 128 * 1024 * 32 * (64 * 4 / 5.5e12 + 16 * 10 / 3e12)
    launches = 64 * (6 + 1) + 16 * (5 + 1)
    assert products / 5.5e12 < product  # so that operations decide
    expected = 5 * product + sums + grads + joining + launches * 2e-6
    assert backward.device == pytest.approx(expected, rel=1e-3)
    assert backward.host == pytest.approx(launches * 5e-6)
    assert backward.kernels == pytest.approx(7.21e-3, rel=1e-2)


def test_chunks_of_columns_follow_where_the_alignment_is_deep() -> None:
    """At 516 sequences, passes over one side's gradient take longer than another product: 275 GFLOP, 2.15 GB."""
    shallow, deep = (OuterProductSizes(s, 1024, 1024, 32, 128) for s in (128, 516))
    assert chunk_choice.joins_sides(shallow)
    assert not chunk_choice.joins_sides(deep)
    product, pair = 274.88e9 / 700e12, 268.4e6
    sums = 4 * 1024 * 32 * 516 * chunk_choice.parts_of_sum(512, 516, 32) / 5.5e12
    own, outer = sums + 2 * 1024 * 2**17 * 2 / 5.5e12, 2.0 * 516 * 2**30 / 700e12
    launches = 64 * (6 + 3) + 16 * (5 + 1)
    grads = pair * (7 / 3e12 + 1 / 5.5e12)
    expected = 3 * outer + 3 * product + own + sums + grads + launches * 2e-6
    assert predict_backward(deep).device == pytest.approx(expected, rel=1e-3)


def _chosen(sequences: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[bool, bool]:
    x = torch.empty(sequences, n, 32, dtype=dtype, device="meta")
    return (
        chunk_choice.choose_forward(x[:1], x.shape[:2], 128),
        chunk_choice.choose_backward(x, n, 128),
    )


def test_choice_by_sizes_device_dtype_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _chosen(2, 3) == (True, True)
    assert _chosen(2, 3, torch.float16) == (False, False)
    monkeypatch.delenv(chunk_choice.VARIABLE)
    assert _chosen(516, 1024) == (False, False)  # no GPU
    monkeypatch.setattr(chunk_choice, "chip_class", lambda device: "sm_90")
    assert _chosen(516, 1024) == _chosen(516, 256) == (True, True)
    assert _chosen(128, 1024) == _chosen(128, 384) == (True, True)
    assert _chosen(128, 200) == _chosen(128, 160) == (False, False)  # a network waits for the host
    assert _chosen(128, 256) == _chosen(516, 100) == (False, True)
    assert _chosen(5120, 100) == (True, True)
    assert _chosen(516, 1024, torch.float32) == (False, False)
    monkeypatch.setattr(chunk_choice, "_HOST", 100e-6)
    assert _chosen(128, 1024) == (False, False)
    monkeypatch.setenv(chunk_choice.VARIABLE, "0")
    assert _chosen(5120, 1024) == (False, False)
    monkeypatch.setenv(chunk_choice.VARIABLE, "yes")
    with pytest.raises(ConfigError, match="FASTFOLD_OUTER_CHUNKS: expected 0 or 1, found 'yes'"):
        _chosen(516, 1024)
