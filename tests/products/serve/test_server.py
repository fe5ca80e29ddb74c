"""Addresses that a server listens on."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from fastfold.errors import ConfigError
from fastfold.products.serve.server import _listening


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
