"""A server that other machines reach needs tokens, and numbers have limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import ConfigError
from fastfold.products.serve.options import ServeOptions, is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
    ],
)
def test_only_the_loopback_is_served_without_tokens(host: str, expected: bool):
    assert is_loopback(host) is expected
    if expected:
        ServeOptions(Path("x"), host=host)
        return
    with pytest.raises(ConfigError, match="reachable from other machines, so requests need tokens"):
        ServeOptions(Path("x"), host=host)
    ServeOptions(Path("x"), host=host, tokens=Path("tokens"))


@pytest.mark.parametrize("host", ["example.org", "", "127.0.0.1:80"])
def test_other_names_than_addresses_are_refused(host: str):
    with pytest.raises(ConfigError, match="expected an IP address"):
        ServeOptions(Path("x"), host=host, tokens=Path("tokens"))


@pytest.mark.parametrize(
    "name", ["port", "group", "max_jobs", "max_queue", "max_residues", "max_connections", "keep_days"]
)
def test_numbers_out_of_range_are_refused_by_name(name: str):
    with pytest.raises(ConfigError, match=f"{name} must be from"):
        ServeOptions(Path("x"), **{name: -1})  # type: ignore[arg-type]


def test_one_connection_is_the_fewest():
    assert ServeOptions(Path("x"), max_connections=1).max_connections == 1
    with pytest.raises(ConfigError, match="max_connections must be from 1 to 100000, found 0"):
        ServeOptions(Path("x"), max_connections=0)
