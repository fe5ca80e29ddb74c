"""Log of the order in which a process consumed its samples; a resumed run repeats it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fastfold.utils.atomic_files import output_error
from fastfold.utils.foreign_text import json_object_or_none


class DrawLog:
    """Log file ``order_rank_<r>.jsonl``: a line per sample, written before the sample is used."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._path = directory / f"order_rank_{rank}.jsonl"
        self._ranks = ranks
        directory.mkdir(parents=True, exist_ok=True)
        if self._path.is_file() and not self._path.read_bytes().endswith(b"\n"):  # a torn line
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n")
        self._file = self._path.open("ab", buffering=0)  # unbuffered, so that a killed process loses no line

    def write(self, step: int, draws: list[tuple[int, str]]) -> None:
        """Record the draws ``(number, name)`` of step ``step`` before their use.

        Raises:
            WriteError: The file cannot be written.
        """
        lines = [{"step": step, "draw": number, "id": name, "ranks": self._ranks} for number, name in draws]
        left = memoryview("".join(f"{json.dumps(line)}\n" for line in lines).encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise output_error(self._path, "write", error) from error

    def replay(self) -> list[int]:
        """Return the recorded draws in order, from runs with the current number of processes.

        Incomplete lines of a killed process are skipped.
        """
        return [draw for draw, _, ranks in _lines(self._path) if ranks == self._ranks]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def consumed_chains(directory: Path) -> set[str]:
    """Return the names of the chains that any process of a run has trained on."""
    return {name for path in directory.glob("order_rank_*.jsonl") for _, name, _ in _lines(path)}


def _lines(path: Path) -> Iterator[tuple[int, str, int]]:
    """Yield draw, name and number of processes of each complete line."""
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json_object_or_none(text) or {}
        try:
            yield int(line["draw"]), str(line["id"]), int(line["ranks"])
        except (ValueError, KeyError, TypeError):
            continue
