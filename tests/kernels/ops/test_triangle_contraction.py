"""The contraction of triangle multiplication takes the memory that its plan says, wherever the product waits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.kernels import reference
from fastfold.kernels.common.layout import padded_width
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.ops.triangle_multiplication.passes import (
    ContractionPlan,
    block_rows,
    contraction_bytes,
    multiply,
    narrow_group,
)
from fastfold.memory import DeviceFull, SimulatedDevice
from fastfold.memory.offload import HostBuffers, OffloadedRows, disk_buffers
from tests.helpers import named_operators
from tests.helpers.forced_blocks import force_blocks
from tests.helpers.kernel_checks import DEVICE, relative_error


def _inputs(n: int, c_z: int = 12, c: int = 16, batch: tuple[int, ...] = ()) -> dict[str, Tensor]:
    torch.manual_seed(n)
    inputs = {"z": torch.randn(*batch, n, n, c_z), "mask": (torch.rand(*batch, n, n) > 0.2).float()}
    shapes = {
        "norm_in_weight": (c_z,),
        "norm_in_bias": (c_z,),
        "proj_weight": (2 * c, c_z),
        "proj_bias": (2 * c,),
        "gate_weight": (2 * c, c_z),
        "gate_bias": (2 * c,),
        "norm_out_weight": (c,),
        "norm_out_bias": (c,),
        "out_weight": (c_z, c),
        "out_bias": (c_z,),
        "out_gate_weight": (c_z, c_z),
        "out_gate_bias": (c_z,),
    }
    return inputs | {name: torch.randn(*shape) * 0.4 for name, shape in shapes.items()}


def _host(simulated: SimulatedDevice, device: str) -> HostBuffers:
    """Host memory that the simulated device does not count."""

    def allocate(elements: int, dtype: torch.dtype) -> Tensor:
        with simulated.host_work():
            return simulated.on_host(torch.empty(elements, dtype=dtype, device=device))

    return HostBuffers(allocate)


@pytest.mark.parametrize(
    ("backend", "channels"), [("torch", 1), ("torch", 3), ("torch", 16), ("torch", 99), ("triton", 5)]
)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("outgoing", [True, False])
def test_every_plan_gives_the_definition(
    outgoing: bool, channels: int, streamed: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in place, with a residual, and with dropout; what waits on the host is in use by two elements in turn."""
    force_blocks(monkeypatch, BM=32, BH=64, BO=64)
    inputs = _inputs(7, batch=(2,))
    dropout = (torch.rand(2, 1, 7, 12) > 0.25).float() / 0.75
    exact = {k: x.double() for k, x in inputs.items()}
    expected = exact["z"] + dropout * reference.triangle_multiplication(**exact, outgoing=outgoing)
    on_device: dict[str, Any] = {k: x.to(DEVICE) for k, x in inputs.items()}
    host = HostBuffers() if streamed else None
    z = on_device["z"]
    named_operators.triangle_multiplication(
        **on_device,
        outgoing=outgoing,
        residual=z,
        dropout=dropout.to(DEVICE),
        out=z,
        plan=ContractionPlan(channels, host),
        backend=backend,
    )
    assert relative_error(z, expected) < 1e-6
    if host is not None:
        width = padded_width(7) if backend == "triton" else 7
        assert host.sent == host.returned == 2 * 7 * width * 16 * 4
        assert host.nbytes == host.sent // 2


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(("kept", "limit"), [(0.5, None), (0.3, 600), (0.0, 900), (1.0, 0)])
def test_rows_of_the_product_stay_or_wait_on_the_host_or_on_a_disk(
    kept: float, limit: int | None, outgoing: bool, tmp_path: Path
) -> None:
    """The numbers are those of one place, and each byte that leaves goes to one place and comes back once."""
    inputs = _inputs(9)
    expected = named_operators.triangle_multiplication(**inputs, outgoing=outgoing, residual=inputs["z"])
    disk = disk_buffers(tmp_path)
    host = HostBuffers(limit=limit, overflow=None if limit is None else disk)
    plan = ContractionPlan(3, host, kept)
    found = inputs["z"].clone()
    for _ in range(2):
        found.copy_(inputs["z"])
        named_operators.triangle_multiplication(
            **(inputs | {"z": found}), outgoing=outgoing, residual=found, out=found, plan=plan
        )
    assert relative_error(found, expected.double()) < 1e-6
    row = 9 * 16 * 4
    waiting = int(9 * (1.0 - kept)) * row
    assert host.sent == host.returned
    assert disk.sent == disk.returned
    assert host.sent + disk.sent == 2 * waiting
    if limit is not None:
        assert host.sent <= 2 * limit
        assert (disk.sent > 0) == (waiting > limit)


@pytest.mark.parametrize(("kept", "limit"), [(0.0, None), (0.4, None), (0.4, 700), (0.0, 0)])
def test_a_tensor_in_several_places_is_read_and_written_by_rows(
    kept: float, limit: int | None, tmp_path: Path
) -> None:
    disk = disk_buffers(tmp_path)
    host = HostBuffers(limit=limit, overflow=None if limit is None else disk)
    tensor = torch.randn(2, 7, 5, 3)
    expected = tensor.clone()
    away = OffloadedRows(tensor, host, kept=kept)
    assert tensor.untyped_storage().nbytes() == 0
    for rows in (slice(0, 7), slice(1, 2), slice(2, 6), slice(6, 7)):
        assert torch.equal(away.rows(rows), expected[:, rows])
    for rows in (slice(1, 4), slice(4, 7)):
        changed = torch.randn(2, rows.stop - rows.start, 5, 3)
        away.write(rows, changed)
        expected[:, rows] = changed
    assert torch.equal(away.restore(), expected)
    assert away.restore() is tensor


class _Shapes:
    """Steps that only check shapes; their factors are padded as on a GPU."""

    share = 1.0
    dtype = torch.bfloat16

    def width(self, n: int) -> int:
        return padded_width(n)

    def project(self, sides: Tensor, z: Tensor, mask: Tensor, first: int, count: int) -> None:
        assert sides.shape == (2 * count, self.width(len(z)), self.width(len(z)))

    def write(
        self, out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None, dropout: Tensor | None
    ) -> None:
        assert z.shape == out.shape
        assert product.shape[2] == self.width(z.shape[1])
        assert product.shape[1] in (len(z), product.shape[2])


def _arguments(simulated: SimulatedDevice, n: int, plan: ContractionPlan, **kind: Any) -> dict[str, Any]:
    z = torch.empty(n, n, 128, **kind)
    mask = torch.empty(n, n, **kind)
    simulated.hold(z)
    simulated.hold(mask)
    tensors = {"out": z, "z": z, "mask": mask, "residual": z, "dropout": None}
    how = {"outgoing": True, "c": 128, "plan": plan}
    return tensors | how | {"steps": _Shapes(), "scratch": Scratch(**kind)}


@pytest.mark.parametrize(("n", "kind"), [(24, "cpu"), (23, "cpu"), (10_000, "meta"), (9_997, "meta")])
@pytest.mark.parametrize(
    ("channels", "streamed", "kept", "most_u"),
    [
        (8, False, 0.0, 2.3),
        (16, False, 0.0, 2.3),
        (8, True, 0.0, 1.3),
        (16, True, 0.0, 1.3),
        (8, True, 0.5, 1.8),
    ],
)
def test_the_exact_peak_beside_the_pair_on_a_device_with_a_hard_budget(
    n: int, kind: str, channels: int, streamed: bool, kept: float, most_u: float
) -> None:
    """Also for 10,000 residues in bfloat16, where the same buffers are made without memory behind them: 2.3 U
    without help and 1.3 U with the host, and one byte less is refused. U is that of the padded length."""
    unit, width = 2 * n * n * 128, padded_width(n)
    mask = 2 * n * n
    sizes = {"channels": channels, "kept": kept, "width": width}
    exact = unit + mask + contraction_bytes(n, 128, 2, streamed=streamed, **sizes)
    assert exact <= most_u * 2 * width * width * 128
    for budget, fits in ((exact, True), (exact - 1, False)):
        device = SimulatedDevice(budget, kind)
        plan = ContractionPlan(channels, _host(device, kind) if streamed else None, kept)
        arguments = _arguments(device, n, plan, device=torch.device(kind), dtype=torch.bfloat16)
        with device.running():
            if fits:
                multiply(**arguments)
                assert device.peak == exact
            else:
                with pytest.raises(DeviceFull):
                    multiply(**arguments)
    if n > 9_000:
        assert exact < ((50 if kept else 40) if streamed else 60) * 10**9


@pytest.mark.parametrize("c", [2, 24, 128])
def test_groups_of_half_the_bytes_take_no_more_memory(c: int) -> None:
    for channels in range(1, c + 1):
        narrow = narrow_group(channels, c)
        of_both = [
            contraction_bytes(100, c, size, channels=count, streamed=False)
            for count, size in ((channels, 4), (narrow, 2))
        ]
        assert of_both[1] <= of_both[0]
        assert narrow == c or narrow > max(channels, c // 2)


def test_blocks_that_come_back_fit_where_the_factors_were() -> None:
    for n in (5, 100, 10_000):
        for channels in (1, 8, 128):
            rows = block_rows(n, 128, channels)
            assert rows == 1 or rows * 128 <= channels * n


def test_host_memory_is_kept_for_the_next_use_and_given_back() -> None:
    host = HostBuffers()
    like = torch.empty(1)
    where = host.buffer(100, like).data_ptr()
    assert host.buffer(60, like).data_ptr() == where
    assert len(host.buffer(200, like)) == 200
    assert host.nbytes == 800
    host.free()
    assert host.nbytes == 0


def test_host_memory_belongs_to_one_use_at_a_time() -> None:
    """What waits stays, what comes meanwhile has memory of its own, and the smallest that is enough is used again."""
    host = HostBuffers()
    like = torch.empty(1)
    waiting = host.buffer(100, like).fill_(1.0)
    host.buffer(50, like).fill_(2.0)
    host.buffer(40, like).fill_(3.0)
    assert host.nbytes == 4 * 150
    host.buffer(60, like).fill_(4.0)
    assert host.nbytes == 4 * 160
    assert waiting.eq(1.0).all()
    where = waiting.data_ptr()
    del waiting
    assert host.buffer(90, like).data_ptr() == where
    assert host.nbytes == 4 * 160


def test_memory_that_will_be_needed_is_taken_at_once_and_divided() -> None:
    """The pair and a product at the same time, then a larger product alone, then both again: never more than that."""
    host, like = HostBuffers(), torch.empty(1)
    host.expected = 4 * 300
    for _ in range(2):
        pair, product = host.buffer(160, like).fill_(1.0), host.buffer(120, like).fill_(2.0)
        assert pair.eq(1.0).all()
        del pair, product
        host.buffer(260, like)
        assert host.nbytes == 4 * 300


class _Driver:
    """A driver of a GPU that may refuse to pin memory, and knows whether it has finished its copies."""

    def __init__(self, status: int) -> None:
        self.status, self.pinned, self.is_busy = status, set[int](), False

    def synchronize(self, device: torch.device) -> None:
        self.is_busy = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.status == 0:
            self.pinned.add(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        assert not self.is_busy
        self.pinned.remove(address)  # an error where it is not pinned
        return 0


@pytest.mark.parametrize("status", [0, 2])
def test_memory_that_the_driver_cannot_lock_is_used_all_the_same(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning; and what was pinned is unpinned before it is given back, after the copies on any stream."""
    driver = _Driver(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    like: Any = SimpleNamespace(dtype=torch.float32, is_cuda=True, device=torch.device("cpu"))
    host = HostBuffers()
    first = host.buffer(1 << 20, like)
    assert driver.pinned == ({first.data_ptr()} if status == 0 else set())
    assert ("cannot pin 0.00 GiB of the host's memory (error 2)" in caplog.text) == (status != 0)
    driver.is_busy = True
    del first
    second = host.buffer(1 << 21, like)
    assert driver.pinned == ({second.data_ptr()} if status == 0 else set())
    driver.is_busy = True
    host.free()
    assert host.nbytes == 0
    assert not driver.pinned
