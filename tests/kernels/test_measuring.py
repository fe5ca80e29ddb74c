"""Times of a GPU are those of the device, whatever the host takes; a simulated stream has known ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernels import measuring

HOST, DEVICE, LAUNCHES = 36e-6, 5e-6, 10
"""Seconds of a launch on the host and on the device, and launches of a call."""


class _Stream:
    """A stream of a GPU on a clock of its own: launches are queued, and run one after the other."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0

    def run(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def sleep(self, cycles: int) -> None:
        self.run(cycles / 1.98e9)

    def synchronize(self, device: torch.device | None = None) -> None:
        self.now = max(self.now, self.free_at)

    def event(self, enable_timing: bool = False) -> SimpleNamespace:
        event = SimpleNamespace(time=0.0)
        event.record = lambda: setattr(event, "time", max(self.free_at, self.now))
        event.query = lambda: event.time <= self.now
        event.elapsed_time = lambda end: 1e3 * (end.time - event.time)
        return event

    def call(self, inputs: object = None) -> None:
        for _ in range(LAUNCHES):
            self.now += HOST
            self.run(DEVICE)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> _Stream:
    """The simulated stream in the place of PyTorch's."""
    stream = _Stream()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: stream.now))
    for name, simulated in {
        "Event": stream.event,
        "_sleep": stream.sleep,
        "synchronize": stream.synchronize,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=0),
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, simulated)
    return stream


def test_the_device_is_timed_apart_from_the_host(stream: _Stream) -> None:
    found = measuring.Meter(torch.device("cuda"), 0.01).time(stream.call, [{}])
    assert found.milliseconds == pytest.approx(1e3 * LAUNCHES * DEVICE)
    assert found.host_milliseconds == pytest.approx(1e3 * LAUNCHES * HOST)


def test_a_first_call_that_compiles_does_not_set_the_wait(stream: _Stream) -> None:
    """The wait grows until a call is queued before it ends, also if a later call takes longer on the host."""
    calls = 0

    def slower(inputs: object) -> None:
        nonlocal calls
        calls += 1
        stream.now += 1e-3 * (calls > 3)
        stream.call()

    found = measuring.Meter(torch.device("cuda"), 0.01).time(slower, [{}])
    assert found.milliseconds == pytest.approx(1e3 * LAUNCHES * DEVICE)


def test_a_call_that_waits_for_the_device_has_the_time_of_both(stream: _Stream) -> None:
    def waits(inputs: object) -> None:
        stream.call()
        stream.synchronize()

    found = measuring.Meter(torch.device("cuda"), 0.01).time(waits, [{}])
    assert found.milliseconds == pytest.approx(1e3 * (LAUNCHES * HOST + DEVICE))
    assert found.host_milliseconds == pytest.approx(found.milliseconds)


def test_a_cpu_has_one_time() -> None:
    found = measuring.Meter(torch.device("cpu"), 0.0).time(lambda inputs: None, [{}])
    assert found.milliseconds == found.host_milliseconds
