"""Listing ``search.json`` of a folder of alignments: which of its files are results of searches.

It has an object per search, by name, with the SHA-256 of each file and of the files that these replaced. A file that is
not listed, or that has changed since, belongs to the user.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from fastfold.utils.foreign_text import json_object_or_none
from fastfold.utils.hashing import file_digest

LISTING = "search.json"


def search_of(path: str | os.PathLike[str]) -> str | None:
    """Return the name of the search that made a file, or None for a file of the user."""
    file = Path(path)
    for name, entry in (json_object_or_none(file.parent / LISTING) or {}).items():
        known = _digests(entry, file.name)
        if known and _digest(file) in known:
            return name
    return None


def _digests(entry: object, file: str) -> list[str]:
    """Return the digests that a search's entry lists for a file; empty if the listing is damaged."""
    if not isinstance(entry, dict):
        return []
    files, replaced = entry.get("files"), entry.get("replaced")
    known = [files.get(file)] if isinstance(files, dict) else []
    earlier = replaced.get(file) if isinstance(replaced, dict) else None
    known += earlier if isinstance(earlier, list) else []
    return [digest for digest in known if isinstance(digest, str)]


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file, computed once per state of it; None if it cannot be read."""
    try:
        state = path.stat()
        return _digest_of(path, (state.st_ino, state.st_size, state.st_mtime_ns))
    except OSError:
        return None


@functools.lru_cache(maxsize=4096)
def _digest_of(path: Path, state: tuple[int, int, int]) -> str:
    return file_digest(path)
