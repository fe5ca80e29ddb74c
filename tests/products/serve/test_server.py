"""Addresses that a server listens on, and the memory by which it admits jobs."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from fastfold.errors import ConfigError
from fastfold.inference.request import InferRequest
from fastfold.inference.workers.options import ScreenOptions
from fastfold.products.serve import server
from fastfold.products.serve.options import ServeOptions
from fastfold.products.serve.server import _listening
from fastfold.products.serve.worker import GroupWorker


def _options(host: str, port: int = 0) -> Any:
    return SimpleNamespace(host=host, port=port, max_connections=5)


@pytest.mark.parametrize(
    ("host", "family", "address"),
    [
        ("127.0.0.1", socket.AF_INET, "127.0.0.1"),
        ("localhost", socket.AF_INET, "127.0.0.1"),
        pytest.param(
            "::1", socket.AF_INET6, "::1", marks=pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
        ),
    ],
)
def test_clients_may_connect_before_the_server_answers(host: str, family: int, address: str) -> None:
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        pytest.skip(f"{address} is not an address of this machine")
    with _listening(_options(host)) as listener:
        assert listener.family == family
        assert listener.getsockname()[0] == address
        with socket.create_connection(listener.getsockname()[:2], timeout=5):
            pass


def test_a_port_in_use_is_named() -> None:
    with _listening(_options("127.0.0.1")) as listener:
        port = listener.getsockname()[1]
        with (
            pytest.raises(
                ConfigError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: .*; choose another"
            ),
            _listening(_options("localhost", port)),
        ):
            pass


@pytest.mark.parametrize(
    ("ray", "device", "workers", "memory", "budget"),
    [
        (None, "cpu", None, 900, None),
        (None, "cpu", 2, 450, 450),
        (None, "cpu", 3, 300, 300),
        (None, "cuda", 2, 40, None),
        ("auto", "cpu", 2, None, None),
    ],
)
def test_jobs_are_admitted_by_the_memory_of_a_worker(
    monkeypatch: pytest.MonkeyPatch,
    ray: str | None,
    device: str,
    workers: int | None,
    memory: int | None,
    budget: int | None,
) -> None:
    """Workers of a processor share its memory, those of GPUs have the smallest; that of a cluster is unknown."""
    said: list[str] = []
    plan = SimpleNamespace(total=lambda free, count: 1000 - 100, share=lambda total, count: total // count)
    started = SimpleNamespace(text="2 workers", executor="executor")
    setups: list[Any] = []

    def setup(networks: Any, request: Any, where: Any, **more: Any) -> Any:
        setups.append((networks, request.config, where, more["search"], more["adapt"]))
        return SimpleNamespace(memory_plan=lambda: plan, start=lambda: started, request=request)

    for name, function in {
        "check_request": lambda config, options: None,
        "choose_device": lambda name: torch.device(device),
        "with_precision": lambda config, here: (config, "" if here is None else f"precision for {here.type}"),
        "requested_networks": lambda weights, number: ["network"],
        "Setup": setup,
        "host_available_bytes": lambda: 2000,
        "host_memory_bytes": lambda device: 7,
        "about_missing_units": lambda precision, here: f"slow {precision}",
        "about_mini": lambda network: f"about {network}",
    }.items():
        monkeypatch.setattr(server, name, function)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = [SimpleNamespace(total_memory=40), SimpleNamespace(total_memory=80)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
    request = InferRequest((), Path("data"))
    where = ScreenOptions(ray=ray, workers=workers)
    backend = server._backend(ServeOptions(data=Path("data"), max_residues=50), request, where, said.append)
    own = backend.check.__self__  # type: ignore[attr-defined]
    assert (own.networks, own.device, own.memory) == (["network"], "cpu" if ray else device, memory)
    assert (own.host_memory, own.max_residues, backend.memory) == (7, 50, budget)
    assert backend.executor() == "executor"
    assert setups == [(["network"], request.config, where, None, GroupWorker)]
    here = [] if ray else [f"precision for {device}", "slow fp32"]
    assert said == ["about network", *here, "2 workers"]
