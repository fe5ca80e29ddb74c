"""Mol*, the viewer of the page, from an installed package."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.inference.report.encode import pack

PACKAGE = "molstar-cli"  #: Package on PyPI with the viewer's files

SHA256 = {
    "molstar.js": "7fad5561c74bc900930fb57d6ab028d1aafdda82223a901bf932b1098e84f1f3",
    "molstar.css": "5b68ceb6d3642549b4e9b2c071e58e41b98a5350ae269180587b39da86925d55",
}
"""SHA-256 of the files in pages, for the version in ``pyproject.toml``."""


@dataclass(frozen=True)
class Molstar:
    """Files of the viewer: JavaScript, CSS, the licence that must accompany them, and their version."""

    script: str
    style: str
    license: str
    version: str


def load_molstar() -> Molstar | None:
    """Read the viewer's files; None if its package lacks them. A ValueError names a file with an unexpected SHA-256."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "static" / "molstar"
    names = ("molstar.js", "molstar.css", "LICENSE.molstar", "VERSION")
    try:
        contents = {name: (folder / name).read_bytes() for name in names}
    except OSError:
        return None
    for name, expected in SHA256.items():
        if (digest := hashlib.sha256(contents[name]).hexdigest()) != expected:
            raise ValueError(
                f"{name} of the package {PACKAGE} has an unknown SHA-256: expected {expected}, found {digest}"
            )
    script, style, license, version = (contents[name].decode("utf-8") for name in names)
    return Molstar(script, style, license, version.strip())


_packed: dict[str, str] = {}
_pending: list[Future[dict[str, str]]] = []


def _is_packed() -> bool:
    return all(key in _packed for key in SHA256.values())


def _pack_viewer() -> dict[str, str]:
    if _is_packed():  # in the process that forked this one
        return _packed
    if (viewer := load_molstar()) is None:
        return {}
    texts = (viewer.script, viewer.style)
    return {key: pack(text.encode("utf-8")) for key, text in zip(SHA256.values(), texts, strict=True)}


def pack_for_forks() -> None:
    """Compress the viewer's files here, so that forks of this process have them; an invalid file is left to pages."""
    with suppress(ValueError):
        _packed.update(_pack_viewer())


def pack_ahead(submit: Callable[[Callable[[], Any]], Future[Any]]) -> None:
    """Have the viewer's files compressed by ``submit`` in another process, unless this one has them."""
    if not _pending and not _is_packed():
        _pending.append(submit(_pack_viewer))


def packed_viewer() -> tuple[str, str]:
    """Return the viewer's packed script and style, compressed once for all pages; errors as :func:`load_molstar`."""
    while _pending:
        with suppress(Exception):  # packed here instead
            _packed.update(_pending.pop().result())
    if not _is_packed():
        _packed.update(_pack_viewer())
    return _packed[SHA256["molstar.js"]], _packed[SHA256["molstar.css"]]
