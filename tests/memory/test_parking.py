"""Tensors that wait elsewhere take no room on the device, and come back as they were."""

from __future__ import annotations

import pytest
import torch

from fastfold.memory import NvmeTier, Parking, SimulatedDevice


@pytest.mark.parametrize("kind", ["host", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recycled_tensor_takes_no_room_between_its_uses(kind, dtype, tmp_path):
    """Two tensors of which only one fits at a time are used in turn, cycle after cycle, bit by bit as without."""
    size = 1000 * dtype.itemsize
    device = SimulatedDevice(2 * size)
    parking = Parking(device, NvmeTier(tmp_path) if kind == "nvme" else None)
    start = torch.arange(1000).to(dtype).view(10, 100)
    with device.running():
        pair, other = parking.park(start.clone()), parking.park(start + 1)
        for _ in range(3):
            x = pair.take()
            x *= 2
            pair = parking.park(x)
            del x
            y = other.take().T
            other = parking.park(y)
            del y
        assert device.used == 0
        result = pair.take()
    assert torch.equal(result, start * 8)
    assert device.peak <= 2 * size
    assert parking.sent == 8 * size
    del pair, other
    assert parking.home.used == 0


def test_what_records_gradients_stays():
    """Its history would keep it on the device, and the copy would have none."""
    x = torch.ones(4, requires_grad=True) * 2
    with pytest.raises(ValueError, match="records gradients"):
        Parking(SimulatedDevice(1000)).park(x)
    with torch.no_grad():
        assert Parking(SimulatedDevice(1000)).park(x).take().sum() == 8
