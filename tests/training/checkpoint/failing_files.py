"""A store behind URLs ``failing://`` that can be made to fail or to end in the middle of a file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class FailingFiles(MemoryFileSystem):
    """Files in memory.

    Attributes:
        left: Bytes that can still be written, or None for any number.
        cut: Parts of names of files, and after how many bytes an opened one ends without an error.
    """

    protocol = "failing"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    left: int | None = None
    cut: dict[str, int] = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = path.removeprefix("failing://").strip("/")
        return f"/{path}" if path else ""

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        file = super()._open(path, mode, *args, **kwargs)
        if mode == "wb":
            return _Limited(self, path, file)
        ends = [size for name, size in self.cut.items() if name in path]
        return io.BytesIO(file.read(ends[0])) if ends else file


class _Limited(MemoryFile):
    """Keeps what was written before the failure, as an upload of several parts may."""

    def __init__(self, files: FailingFiles, path: str, file: MemoryFile) -> None:
        super().__init__(files, path)
        self._files = files
        files.store[path] = self

    def write(self, data: Any) -> int:
        left = self._files.left
        if left is None or len(data) <= left:
            if left is not None:
                self._files.left = left - len(data)
            return super().write(data)
        self._files.left = 0
        super().write(bytes(data)[:left])
        raise ConnectionError("the store is gone")


@pytest.fixture
def failing_files() -> Iterator[FailingFiles]:
    """The store, empty and in order."""
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    files = fsspec.filesystem("failing")
    FailingFiles.store.clear()
    FailingFiles.pseudo_dirs[:] = [""]
    files.left, files.cut = None, {}
    yield files
    files.left, files.cut = None, {}
