"""The built documentation: links lead somewhere, and the search ranks pages for users first."""

from __future__ import annotations

import html
import json
import os
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import REPOSITORY
from tests.helpers.browser import Browser

SITE = REPOSITORY / "build" / "docs"
FIRST = {
    "install": "install.html",
    "templates": "templates.html",
    "restraints": "restraints.html",
    "screen": "screening.html",
    "mini": "mini.html",
    "msa server": "msa_server.html",
}
"""Page that a search lists first."""
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


def test_the_search_ranks_pages_for_users_first(browser: Browser) -> None:
    is_done = "/found|did not match/.test(document.querySelector('.search-summary')?.textContent)"
    results = (
        "[...document.querySelectorAll('#search-results li > a')].map((one) => one.getAttribute('href'))"
    )
    first = {}
    for words in FIRST:
        query = words.replace(" ", "+")
        browser.call("Page.navigate", url=f"{(SITE / 'search.html').as_uri()}?q={query}")
        browser.wait(f"location.search === {json.dumps(f'?q={query}')} && {is_done}")
        page = browser.wait(f"{results}[0]")
        first[words] = re.split("[#?]", page)[0]
    assert first == FIRST
