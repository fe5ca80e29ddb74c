"""Front page of a server: a form for sequences, the queue, and the user's jobs with their results."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fastfold._version import __version__
from fastfold.inference.report.html_page import fill_template, page_file, script_of, source_hash

_PACKAGE = "fastfold.products.serve"


class Page(NamedTuple):
    """HTML of a page, and its Content-Security-Policy."""

    html: str
    policy: str


@lru_cache(2)
def front_page(*, has_tokens: bool) -> Page:
    """Return the front page; with tokens it asks for one first.

    The page is one file. Only its own script runs, and only this server is reached.
    """
    style = page_file("theme.css") + page_file("front.css", _PACKAGE)
    parts = [page_file(name, _PACKAGE) for name in ("target.js", "jobs.js", "front.js")]
    script = script_of(page_file("dom.js"), *parts)
    values = {
        "css": style,
        "script": script,
        "tokens": "yes" if has_tokens else "no",
        "about": f"FastFold {__version__}",
    }
    policy = (
        f"default-src 'none'; script-src {source_hash(script)}; style-src {source_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(fill_template(page_file("front.html", _PACKAGE), values, plain=("css", "script")), policy)
