"""Leave invalid files and predictions out of the report, with a reason."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastfold.errors import FastFoldError, first_line
from fastfold.inference.output.written_scores import MAX_SCORES_BYTES


@contextlib.contextmanager
def leaving_out(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Convert any error of the block to a line that names the left-out item and the reason."""
    try:
        yield
    except Exception as error:  # untrusted data may break any step; other predictions are still shown
        say(f"{name}: left out of the report, {_reason(error)}")


def is_regular(path: Path) -> bool:
    """Return True for a file, not a link, because links could lead out of the folder."""
    return path.is_file() and not path.is_symlink()


def check_size(path: Path, limit: int = MAX_SCORES_BYTES) -> Path:
    """Return the path of a file, or raise ValueError if it is larger than a limit in bytes."""
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"expected at most {limit:,} bytes, found {size:,}")
    return path


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the lines of a tab-separated table, which may come from anywhere; none without a valid file."""
    try:
        lines = check_size(path).read_text("utf-8").splitlines()
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, ValueError, csv.Error):
        return []


def numbers_of(line: Mapping[str, Any], columns: Iterable[str]) -> dict[str, float]:
    """Return the finite numbers in some columns of a line."""
    found = {}
    for column in columns:
        with contextlib.suppress(TypeError, ValueError):
            found[column] = float(line.get(column, ""))
    return {column: value for column, value in found.items() if math.isfinite(value)}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror}"
    if isinstance(error, json.JSONDecodeError | RecursionError):
        return "it is not JSON"
    if isinstance(error, ValueError | FastFoldError):
        return str(error)
    return f"it cannot be read: {first_line(error)}"
