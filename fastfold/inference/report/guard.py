"""Leave invalid files and predictions out of the report, with a reason."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from fastfold.errors import FastFoldError, first_line


@contextlib.contextmanager
def leaving_out(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Convert any error of the block to a line that names the left-out item and the reason.

    Args:
        name: File or prediction that the block reads.
        say: Called with the line.
    """
    try:
        yield
    except Exception as error:  # untrusted data may break any step; other predictions are still shown
        say(f"{name}: left out of the report, {_reason(error)}")


def check_size(path: Path, limit: int) -> Path:
    """Return the path of a file after checking its size against a limit in bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is larger.
    """
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"expected at most {limit:,} bytes, found {size:,}")
    return path


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror}"
    if isinstance(error, json.JSONDecodeError | RecursionError):
        return "it is not JSON"
    if isinstance(error, ValueError | FastFoldError):
        return str(error)
    return f"it cannot be read: {first_line(error)}"
