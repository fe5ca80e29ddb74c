"""The built documentation: links lead somewhere."""

from __future__ import annotations

import html
import os
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import REPOSITORY

SITE = REPOSITORY / "build" / "docs"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="needs the site; make docs builds it"),
]


@cache
def _ids(page: Path) -> set[str]:
    return set(map(html.unescape, re.findall(r'\bid="([^"]*)"', page.read_text("utf-8"))))


def broken_links(site: Path) -> list[str]:
    """Return each link between pages of a site that leads to a missing file or place."""
    broken = set()
    for page in site.rglob("*.html"):
        for link in set(re.findall(r'<a\b[^>]*\bhref="([^"]*)"', page.read_text("utf-8"))):
            address, _, place = unquote(html.unescape(link)).partition("#")
            if re.match(r"\w+:", address):
                continue
            target = Path(os.path.normpath(page.parent / address)) if address else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (place and target.suffix == ".html" and place not in _ids(target)):
                broken.add(f"{page.relative_to(site)}: {link}")
    return sorted(broken)


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">x</a><a class="y" href="c.html">x</a><a href="#z">x</a>'
    )
    (tmp_path / "b.html").write_text(
        '<p id="here"><a href="a.html">x</a><a href="https://x.org/#y">x</a></p>'
    )
    assert broken_links(tmp_path) == ["a.html: #z", "a.html: c.html"]


def test_links_lead_somewhere() -> None:
    assert len(list(SITE.rglob("*.html"))) > 500
    assert broken_links(SITE) == []
