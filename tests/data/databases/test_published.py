"""The table of the documentation lists what can be downloaded."""

from __future__ import annotations

import re

import pytest

from fastfold.data.databases.published import DATABASES, find_published
from fastfold.errors import ConfigError
from tests.conftest import REPOSITORY


def test_the_documents_list_all_databases() -> None:
    text = (REPOSITORY / "docs" / "databases.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) GB \|", text, re.MULTILINE))
    assert {name: float(size) for name, size in rows.items()} == {
        one.name: one.download_gb for one in DATABASES
    }


def test_addresses_differ_and_end_in_their_files() -> None:
    names = [url.rpartition("/")[2] for one in DATABASES for url in one.urls]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)
    with pytest.raises(ConfigError, match="'bfd2' is not a database of AlphaFold"):
        find_published("bfd2")
