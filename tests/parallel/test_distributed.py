"""Processes find each other, or say why not."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan, distributed, init_distributed

CPU = torch.device("cpu")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """This is the first of two processes; how long it would have paused between attempts."""
    found: list[float] = []
    monkeypatch.setattr(distributed.time, "sleep", found.append)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return found


def test_a_port_that_another_program_has_is_named(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(ConfigError, match=rf"rank 0 of 2 did not find .* at 127\.0\.0\.1:{port} .*in use"),
            init_distributed(ParallelPlan(dp=2), CPU),
        ):
            pass
    assert pauses == [1.0, 2.0, 4.0]
    assert not dist.is_initialized()


def test_a_connection_that_fails_at_first_is_tried_again_with_the_time_that_was_asked_for(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Met(Exception):
        """The processes have found each other."""

    timeouts: list[timedelta] = []

    def meet(backend: str, **options: Any) -> None:
        timeouts.append(options["timeout"])
        if len(timeouts) < 3:
            raise dist.DistNetworkError("connection refused")
        raise Met

    monkeypatch.setattr(dist, "init_process_group", meet)
    with pytest.raises(Met), init_distributed(ParallelPlan(dp=2), CPU, timeout=timedelta(minutes=3)):
        pass
    assert (pauses, timeouts) == ([1.0, 2.0], [timedelta(minutes=3)] * 3)
