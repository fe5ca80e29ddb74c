"""Failures of requests behind a proxy name the proxy."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from fastfold.errors import NetworkError
from fastfold.utils.download.http import open_url
from tests.helpers.loopback import Request, loopback


def _refuse(request: Request) -> None:
    request.send(403, b"<html>Access denied by policy</html>")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("login", ["", "user:secret@"])
def test_a_proxy_that_refuses_a_tunnel_is_named(monkeypatch: pytest.MonkeyPatch, login: str) -> None:
    with loopback(_refuse) as server:
        place = urlsplit(server.url).netloc
        monkeypatch.setenv("https_proxy", f"http://{login}{place}")
        with pytest.raises(NetworkError) as found:
            open_url("https://api.example.org/ticket/msa", data=b"q=1")
    assert str(found.value) == (
        f"cannot reach https://api.example.org/ticket/msa: the proxy {place} answers 403 (Forbidden): ask its operator "
        "for access to api.example.org, or set no_proxy=api.example.org if api.example.org is reached without it"
    )
    assert not found.value.temporary


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_403_that_comes_through_a_proxy_names_both(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    with loopback(_refuse) as server:
        place = urlsplit(server.url).netloc
        monkeypatch.setenv("http_proxy", f"{scheme}{place}")
        with pytest.raises(
            NetworkError, match=f"the server answers 403 .*, or the proxy {place} does: ask"
        ) as found:
            open_url("http://db.example.org/uniref.fasta")
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        with pytest.raises(NetworkError, match=r"the server answers 403 \(Forbidden\)$"):
            open_url(server.url)
    assert found.value.status == 403


def test_a_403_without_a_proxy_is_the_server_s() -> None:
    with loopback(_refuse) as server, pytest.raises(NetworkError, match=r"answers 403 \(Forbidden\)$"):
        open_url(server.url)
