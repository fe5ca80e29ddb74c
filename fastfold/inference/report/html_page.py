"""Parts of HTML pages that run only their own scripts: templates, hashes of scripts, and data in a page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Any


def page_file(name: str, package: str = "fastfold.inference.report") -> str:
    """Return the text of a file of a package's folder ``page``."""
    return (files(package) / "page" / name).read_text("utf-8")


def script_of(*sources: str) -> str:
    """Join sources into one script with its own scope."""
    return "(() => {\n'use strict';\n" + "\n".join(sources) + "\n})();\n"


def source_hash(source: str) -> str:
    """Return the source of a Content-Security-Policy that allows a script or a style by its SHA-256."""
    digest = hashlib.sha256(source.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def json_element(value: Any) -> str:
    """Return JSON without characters that could end a script element; ValueError for a number that is not finite."""
    return json.dumps(value, allow_nan=False).translate({ord(c): f"\\u{ord(c):04x}" for c in "&<>"})


def fill_template(template: str, values: Mapping[str, str], plain: Collection[str]) -> str:
    """Replace ``{{name}}`` by escaped values; those named in ``plain`` stay as they are, so they must be trusted."""

    def fill(field: re.Match[str]) -> str:
        value = values[field[1]]
        return value if field[1] in plain else html.escape(value, quote=True)

    return re.sub(r"\{\{(\w+)\}\}", fill, template)
