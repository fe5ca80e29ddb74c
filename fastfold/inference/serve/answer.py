"""Answer to a job in its folder, written by a worker and read by the server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastfold.errors import InputError
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.foreign_text import read_json_object

ANSWER = "answer.json"  #: Name of the file with the answer of a finished job
_LIMIT = 1 << 24


@dataclass(frozen=True)
class JobAnswer:
    """Result of a job in words, and scores and names of files of a folded one."""

    state: Literal["done", "failed"]
    text: str
    scores: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def write_answer(folder: Path, answer: JobAnswer) -> None:
    """Write the answer to the job of a folder."""
    write_atomic(folder / ANSWER, json.dumps(asdict(answer)))


def read_answer(folder: Path) -> JobAnswer | None:
    """Return the answer in a job's folder, None if there is none yet.

    Raises:
        InputError: The answer cannot be read, or is damaged.
    """
    path = folder / ANSWER
    if not path.exists():
        return None
    content = read_json_object(path, "parts of an answer to their values", limit=_LIMIT)
    state, text = content.get("state"), content.get("text")
    scores, files = content.get("scores", {}), content.get("files", [])
    if (
        state not in ("done", "failed")
        or not isinstance(text, str)
        or not isinstance(scores, dict)
        or not (isinstance(files, list) and all(isinstance(name, str) for name in files))
    ):
        raise InputError("is not an answer to a job", path=path)
    return JobAnswer(state, text, scores, files)
