"""The simulated device counts exactly and refuses; tiers keep what they are given."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.errors import OutputError
from fastfold.memory import DeviceFull, NvmeTier, SimulatedDevice, Tier
from fastfold.memory.devices import tiers
from fastfold.memory.devices.disk_file import map_file
from fastfold.memory.devices.tiers import ALIGNMENT


def test_operators_are_counted_until_their_memory_goes():
    """Peak and use are exact; a view takes nothing; the last reference gives the room back."""
    device = SimulatedDevice(10_000)
    with device.running():
        a = torch.ones(100)
        assert device.used == 400
        b = (a + a).view(10, 10)[2:]
        assert device.used == 800
        del a
        assert device.used == 400
        c = b * 2
    assert device.used == 400 + 8 * 10 * 4
    assert device.peak == 800
    del b, c
    assert device.used == 0


def test_the_parts_of_an_operator_are_counted_and_its_own_argument_is_not():
    """In inference mode operators arrive whole: a loss has parts, a conversion may return its argument."""
    parameter = torch.ones(4, 10)
    device = SimulatedDevice(10_000)
    with device.running(), torch.inference_mode():
        assert parameter.to(torch.float32) is parameter
        assert device.peak == 0
        x = torch.ones(3, 4, 10)
        copy = x.transpose(0, 1).flatten()
        assert device.used == device.peak == 2 * x.nbytes
        torch.nn.functional.l1_loss(x.flatten(), copy)  # mean of the absolute value of a difference
        assert device.peak >= 3 * x.nbytes
        assert device.used == x.nbytes + copy.nbytes


def test_backward_is_counted_too():
    """What autograd keeps and what the backward pass makes take room."""
    device = SimulatedDevice(1 << 20)
    x = torch.ones(1000, requires_grad=True)
    with device.running():
        y = (x * 2).exp().sum()
        assert device.used == 4000 + 4
        device.mark()
        y.backward()
        # The saved result, the gradient after it, the loss and its gradient of one.
        assert device.mark() == 2 * 4000 + 2 * 4
    del y
    assert device.used == 4000, "the gradient stays"


def test_allocation_beyond_the_budget_raises_and_takes_nothing():
    """The budget is hard for operators and for chunks, to the byte."""
    device = SimulatedDevice(400)
    with device.running():
        a = torch.ones(100)
        with pytest.raises(DeviceFull, match="400 of 400 are in use"):
            torch.ones(1)
        assert device.used == 400
        del a
    buffer = device.reserve(101, torch.float32)
    with pytest.raises(DeviceFull):
        device.fill(buffer, torch.ones(101))


def test_what_has_left_the_device_reads_as_nan():
    """An access that nobody announced cannot go unnoticed."""
    device = SimulatedDevice(400)
    buffer = device.reserve(100, torch.float32)
    view = buffer[10:20]
    assert view.isnan().all()
    device.fill(buffer, torch.ones(100))
    assert view.sum() == 10
    assert device.used == 400
    device.drop(buffer)
    assert view.isnan().all()
    assert (device.used, device.peak, device.received) == (0, 400, 400)


def test_host_work_is_not_counted():
    """What runs on the host takes no room on the device."""
    device = SimulatedDevice(400)
    with device.running(), device.host_work():
        a = torch.ones(1000)
    assert device.used == 0
    del a


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_tiers_hold_what_is_written(kind, dtype, tmp_path):
    """A buffer is flat, starts as zeros, takes updates in place, and is given back."""
    tier = Tier() if kind == "host" else NvmeTier(tmp_path)
    buffer = tier.allocate(1000, dtype)
    assert buffer.count_nonzero() == 0
    buffer.view(10, 100)[3] += 1
    assert buffer.sum() == 100
    assert tier.used == 1000 * dtype.itemsize
    assert os.listdir(tmp_path) == [], "files have no names: a killed run leaves nothing"
    del buffer
    assert tier.used == 0


def test_what_waits_on_the_host_is_not_filled_first(monkeypatch):
    """Zeros would take as long as the copy that follows; what is kept begins with them all the same."""
    tier, zeros = Tier(), torch.zeros
    assert not tier.allocate(10, torch.float32).any()
    monkeypatch.setattr(torch, "zeros", None)
    waiting = tier.allocate_waiting(10, torch.float32)
    assert tier.used == waiting.nbytes == 40
    del waiting
    assert tier.used == 0
    monkeypatch.setattr(torch, "zeros", zeros)


def test_what_waits_on_a_disk_uses_its_files_again(tmp_path, monkeypatch):
    """Whatever comes in a second step finds room in the files of the first; parts that are held are left alone."""
    made = []
    monkeypatch.setattr(tiers, "map_file", lambda folder, size: made.append(size) or map_file(folder, size))
    tier, sizes = NvmeTier(tmp_path), (1000, 3, 1 << 22, 17, 5 << 22)
    for step in range(3):
        waiting = [
            tier.allocate_waiting(size, dtype).fill_(step + index)
            for index, (size, dtype) in enumerate(itertools.product(sizes, (torch.float32, torch.bfloat16)))
        ]
        assert all((x == step + index).all() for index, x in enumerate(waiting))
        assert all(x.data_ptr() % ALIGNMENT == 0 for x in waiting)
        assert tier.used == sum(x.nbytes for x in waiting) == 6 * sum(sizes)
        if step == 0:
            first = list(made)
        del waiting
        assert tier.used == 0
    assert made == first
    assert min(made) == 1 << 26
    assert max(made) == 4 * (5 << 22)
    assert len(made) < len(sizes)
    assert os.listdir(tmp_path) == []


def test_files_of_what_waits_no_more_are_given_back(tmp_path):
    """When the parts become longer than the files, the old ones go."""
    tier = NvmeTier(tmp_path)
    before = weakref.ref(tier.allocate_waiting(10, torch.float32))
    assert before() is None
    held = tier.allocate_waiting(1 << 25, torch.float32)
    assert len(tier._waiting) == 1
    more = tier.allocate_waiting(1 << 25, torch.float32)
    assert len(tier._waiting) == 2
    del held, more


def test_a_full_disk_is_a_clear_error(tmp_path):
    """The room is reserved at once: no write to the map can fail later."""
    with pytest.raises(
        OutputError, match=r"cannot reserve .* bytes for the memory tier on this disk.*Free some space"
    ):
        NvmeTier(tmp_path).allocate(1 << 50, torch.float32)
    with pytest.raises(
        OutputError, match=r"cannot reserve .* bytes for the memory tier on this disk.*Free some space"
    ):
        NvmeTier(tmp_path).allocate_waiting(1 << 50, torch.float32)
    with pytest.raises(OutputError, match="missing"):
        NvmeTier(tmp_path / "missing").allocate(10, torch.float32)


def in_memory(buffer: torch.Tensor) -> float:
    """Share of a mapped buffer's pages that the kernel has read."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = buffer.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = buffer.data_ptr() + buffer.nbytes - first
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def test_all_of_what_is_announced_is_read_from_the_disk_before_anyone_looks(tmp_path):
    """Of 64 MiB the kernel reads a few when it is asked for all of them at once."""
    tier = NvmeTier(tmp_path)
    tier.preallocate((1 << 26) + (1 << 13))
    tier.allocate_kept(1000, torch.float32)
    buffer = tier.allocate_kept(1 << 24, torch.float32).fill_(1.0)
    room = tier._file.map
    room.flush()
    room.madvise(getattr(mmap, "MADV_PAGEOUT", 21))
    if in_memory(buffer) > 0.1:
        pytest.skip("the kernel keeps this file system's pages in memory")
    tier.announce(buffer)
    end = time.monotonic() + 20
    while in_memory(buffer) < 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert in_memory(buffer) == 1
    assert bool((buffer == 1).all())


@pytest.mark.parametrize("coherent", [True, False])
def test_what_threads_write_to_a_disk_is_what_the_map_shows(coherent, tmp_path):
    """In its place and nowhere else, of any type; what is written through the map later is not undone."""
    tier = NvmeTier(tmp_path)
    tier.preallocate(1 << 16)
    assert tier._file._coherent
    tier._file._coherent = coherent
    first = tier.allocate_kept(3000, torch.bfloat16)
    second = tier.allocate_kept(2000, torch.float32)
    assert second.data_ptr() - first.data_ptr() == 8192, "parts begin on pages"
    device = SimulatedDevice(1 << 20)
    device.fetch(torch.full((10, 5), 2.0, dtype=torch.bfloat16), first[100:150].view(10, 5), tier, add=False)
    device.fetch(torch.arange(8.0).view(2, 4).t(), second[8:16].view(4, 2), tier, add=False)
    device.fetch(torch.ones(8), second[16:24], tier, add=False)
    device.fetch(torch.ones(8), second[16:24], tier, add=True)
    device.settle()
    assert first.nonzero().flatten().tolist() == list(range(100, 150))
    assert first.sum() == 100
    assert second[8:16].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert second.sum() == 28 + 16
    second[16:24] = 5.0
    assert second.sum() == 28 + 40


def test_a_disk_that_fails_to_write_is_told_when_all_is_settled(tmp_path, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    tier, device = NvmeTier(tmp_path), SimulatedDevice(1 << 20)
    tier.preallocate(1 << 12)
    place = tier.allocate_kept(8, torch.float32)
    monkeypatch.setattr("os.pwritev", fail)
    device.fetch(torch.ones(8), place, tier, add=False)
    with pytest.raises(OSError, match="Input/output error"):
        device.settle()


def test_writes_to_a_disk_run_beside_what_follows(tmp_path, monkeypatch):
    """A write waits for what is computed after it has begun."""
    computed, write = threading.Event(), os.pwritev
    tier, device = NvmeTier(tmp_path), SimulatedDevice(1 << 20)
    tier.preallocate(1 << 12)
    place = tier.allocate_kept(8, torch.float32)

    def slow(*args: object) -> int:
        assert computed.wait(60)
        return write(*args)

    monkeypatch.setattr("os.pwritev", slow)
    device.fetch(torch.ones(8), place, tier, add=False)
    computed.set()
    device.settle()
    assert place.sum() == 8


def test_what_is_fetched_is_in_its_place_when_all_is_settled():
    """A copy, then a sum on top of it, in this order; the tensors may go meanwhile."""
    device, place = SimulatedDevice(1 << 20), torch.full((4,), 7.0)
    for value, add in ((1.0, False), (2.0, True), (3.0, True)):
        device.fetch(torch.full((4,), value), place, Tier(), add=add)
    assert place.tolist() == [7.0] * 4
    device.settle()
    assert place.tolist() == [6.0] * 4


def test_not_much_waits_to_be_put_in_its_place(monkeypatch):
    monkeypatch.setattr("fastfold.memory.devices.device._WAITING", 40)
    device, places = SimulatedDevice(1 << 20), [torch.zeros(4) for _ in range(5)]
    for place in places:
        device.fetch(torch.ones(4), place, Tier(), add=False)
    assert [place.sum().item() for place in places] == [4, 4, 4, 0, 0]


def test_what_comes_early_counts_as_chunks_do_until_it_is_taken():
    device, host = SimulatedDevice(1000), Tier()
    with device.running():
        copy = device.send(torch.arange(100.0), host)
        early_copy = device.begin(copy, (10, 10), (1, 10))
        assert (device.early_copy_bytes, device.used, device.other) == (400, 400, 0)
        tensor = device.take(early_copy)
        assert (device.early_copy_bytes, device.used, device.other) == (0, 400, 400)
        assert torch.equal(tensor, torch.arange(100.0).view(10, 10).t())
        del tensor
        assert (device.used, device.other) == (0, 0)
        early_copy = device.begin(copy, (100,), (1,))
        device.call_off()
        assert (device.early_copy_bytes, device.used) == (0, 0)
        assert device.take(early_copy) is None
        with device.host_work():
            wide = host.allocate(200, torch.float32)
        device.begin(wide, (200,), (1,))
        with pytest.raises(DeviceFull):
            device.begin(wide, (200,), (1,))


def test_counting_can_be_interrupted_but_not_from_within_another_mode() -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    device = SimulatedDevice(10_000)
    with device.running():
        one = torch.zeros(100)
        assert not device.count(False)
        two = torch.zeros(100)
        assert device.used == one.nbytes
        with Other():
            assert not device.count(True)  # it would be left in place of the other
        assert device.count(True)
        three = torch.zeros(100)
        with Other():
            assert device.count(False)
        assert device.used == one.nbytes + three.nbytes
        device.count(False)
    assert torch._C._len_torch_dispatch_stack() == 0
    with device.running():
        four = torch.zeros(100)
    assert device.used == 3 * four.nbytes == 3 * two.nbytes
    assert torch._C._len_torch_dispatch_stack() == 0


def test_counting_is_not_interrupted_within_an_inference_mode() -> None:
    """The end of an inference mode restores the modes of its beginning, also one that has been left inside."""
    device = SimulatedDevice(1000)
    for inside in (True, False):
        with device.running():
            if not inside:
                device.count(False)
            with torch.inference_mode():
                assert device.count(inside) is inside
                assert device.count(not inside) is inside
            kept = torch.ones(10)
            assert device.used == (40 if inside else 0)
            assert device.count(True)
        del kept
    assert device.used == 0
