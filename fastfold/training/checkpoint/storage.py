"""Storage of checkpoints: a folder, or a URL of an object store or another file system (fsspec)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fastfold.errors import ConfigError, first_line
from fastfold.utils.atomic_files import prepare_output_directory, temporary_name
from fastfold.utils.download.pieces import Piece, copy_piece

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extras of this package that install the drivers of a protocol."""


class Storage:
    """Folders of files below one place, a folder or a URL such as ``s3://bucket/run``; all paths are text.

    In a folder, renaming makes checkpoints appear atomically. Object stores cannot rename, so the file written last
    marks a checkpoint as complete. Methods raise :class:`OSError`, or an error of a driver.

    Raises:
        ConfigError: fsspec or the driver of the URL is not installed, or refuses the URL.
    """

    def __init__(self, place: str) -> None:
        self._place = place.rstrip("/") if is_url(place) else place
        self._remote = _file_system(place) if is_url(place) else None

    def prepare(self) -> None:
        """Create the place, and check that it is writable.

        Raises:
            FastFoldError: The place is not writable; the message has a remedy.
        """
        if self._remote is None:
            prepare_output_directory(self._place)
            return
        probe = self.join(temporary_name())
        try:
            with self.create(probe) as file:
                file.write(b"\n")
            self._remote.rm(probe)
        except Exception as error:  # errors of drivers lack a common base
            raise ConfigError(
                f"cannot write checkpoints to {self._place}: {first_line(error)}; check the address and your "
                "permission to write there"
            ) from error

    def names(self) -> list[str]:
        """Return the names of files and folders in the place, in any order."""
        with suppress(FileNotFoundError):
            if self._remote is None:
                return os.listdir(self._place)
            self._remote.invalidate_cache()
            return [
                path.rstrip("/").rpartition("/")[2] for path in self._remote.ls(self._place, detail=False)
            ]
        return []

    def join(self, *names: str) -> str:
        """Return the path of a file or folder below the place."""
        return os.path.join(self._place, *names) if self._remote is None else "/".join((self._place, *names))

    def read(self, path: str, *, limit: int) -> bytes:
        """Read a file of at most ``limit`` bytes.

        Raises:
            FileNotFoundError: The file does not exist.
            OSError: The file is larger.
        """
        size = self.size(path)  # None for a pipe, too, which reading would wait for
        if size is None:
            raise FileNotFoundError(path)
        if size > limit:
            raise OSError(f"expected at most {limit:,} bytes, found {size:,}")
        return Path(path).read_bytes() if self._remote is None else bytes(self._remote.cat_file(path))

    def size(self, path: str) -> int | None:
        """Return a file's length in bytes, or None if it does not exist."""
        if self._remote is None:
            return Path(path).stat().st_size if Path(path).is_file() else None
        with suppress(FileNotFoundError):
            return int(self._remote.info(path)["size"])
        return None

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Open a file for writing, and create its folder."""
        if self._remote is None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                yield file
                if not file.closed:
                    file.flush()
                    os.fsync(file.fileno())
            return
        try:
            opened = self._remote.open(path, "wb")
        except FileNotFoundError:
            # Only after a failure: on object stores makedirs would create a bucket from a misspelt name.
            self._remote.makedirs(path.rpartition("/")[0], exist_ok=True)
            opened = self._remote.open(path, "wb")
        with opened as file:
            yield file

    def staging(self, folder: str) -> str:
        """Return the path to write to before :meth:`publish` makes it ``folder``."""
        path = Path(folder)
        return str(path.with_name(f".{path.name}.tmp")) if self._remote is None else folder

    def publish(self, staging: str, folder: str) -> None:
        """Replace ``folder`` by the written one."""
        if self._remote is None:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(staging, folder)

    def remove(self, folder: str) -> None:
        """Remove a folder, if it exists."""
        if self._remote is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        with suppress(FileNotFoundError):
            self._remote.rm(folder, recursive=True)

    def fetch(self, path: str, to: Path, *, size: int) -> None:
        """Copy a file of ``size`` bytes from a URL to this machine."""
        assert self._remote is not None
        to.unlink(missing_ok=True)  # a copy of an earlier search, not a beginning of this one
        with self._remote.open(path, "rb") as source:
            copy_piece(Piece(to.name, path, source, 0, size), to)


def is_url(place: str) -> bool:
    """Return True for a URL, False for a path."""
    return "://" in place


def _file_system(url: str) -> Any:
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)[0]
    except ImportError as error:
        protocol = url.partition("://")[0]
        extra = _EXTRAS.get(protocol, "fsspec")
        raise ConfigError(
            f'{url} needs a package that is not installed ({first_line(error)}): pip install "fastfold[{extra}]"'
        ) from error
    except Exception as error:
        raise ConfigError(f"cannot write checkpoints to {url}: {first_line(error)}") from error
