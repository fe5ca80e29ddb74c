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

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extras of this package that install the drivers of a protocol."""


class Storage:
    """Folders of files below one place, a local folder; all paths are text. Subclasses are other places.

    Renaming makes checkpoints appear atomically. Methods raise :class:`OSError`, or an error of a driver.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def prepare(self) -> None:
        """Create the place, and check that it is writable.

        Raises:
            FastFoldError: The place is not writable; the message has a remedy.
        """
        prepare_output_directory(self._place)

    def names(self) -> list[str]:
        """Return the names of files and folders in the place, in any order."""
        with suppress(FileNotFoundError):
            return os.listdir(self._place)
        return []

    def join(self, *names: str) -> str:
        """Return the path of a file or folder below the place; absolute paths and URLs are kept."""
        return os.path.join(self._place, *names)

    def read(self, path: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        if not Path(path).is_file():  # reading a pipe would block
            raise FileNotFoundError(path)
        return Path(path).read_bytes()

    def size(self, path: str) -> int | None:
        """Return a file's length in bytes, or None if it does not exist."""
        file = Path(path)
        return file.stat().st_size if file.is_file() else None

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Open a file for writing, and create its folder."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            yield file
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())

    def staging(self, folder: str) -> str:
        """Return the path to write to before :meth:`publish` makes it ``folder``."""
        path = Path(folder)
        return str(path.with_name(f".{path.name}.tmp"))

    def publish(self, staging: str, folder: str) -> None:
        """Replace ``folder`` by the written one."""
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(staging, folder)

    def remove(self, folder: str) -> None:
        """Remove a folder, if it exists."""
        shutil.rmtree(folder, ignore_errors=True)

    def fetch(self, path: str, to: Path) -> None:
        """Copy a file to this machine."""
        shutil.copyfile(path, to)


class UrlStorage(Storage):
    """Storage at a URL; object stores cannot rename, so the file written last marks a checkpoint as complete.

    Raises:
        ConfigError: fsspec or the driver of the URL is not installed, or refuses the URL.
    """

    def __init__(self, place: str) -> None:
        self._place = place.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            self._files: Any = url_to_fs(place)[0]
        except ImportError as error:
            protocol = place.partition("://")[0]
            extra = _EXTRAS.get(protocol, "fsspec")
            raise ConfigError(
                f'{place} needs a package that is not installed ({first_line(error)}): pip install "fastfold[{extra}]"'
            ) from error
        except Exception as error:
            raise ConfigError(f"cannot write checkpoints to {place}: {first_line(error)}") from error

    def prepare(self) -> None:
        probe = self.join(temporary_name())
        try:
            with self.create(probe) as file:
                file.write(b"\n")
            self._files.rm(probe)
        except Exception as error:  # errors of drivers lack a common base
            raise ConfigError(
                f"cannot write checkpoints to {self._place}: {first_line(error)}; check the address and your "
                "permission to write there"
            ) from error

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            return [path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._place, detail=False)]
        return []

    def join(self, *names: str) -> str:
        path = self._place
        for name in names:
            path = name if is_url(name) else f"{path}/{name}"
        return path

    def read(self, path: str) -> bytes:
        found: bytes = self._files.cat_file(path)
        return found

    def size(self, path: str) -> int | None:
        with suppress(FileNotFoundError):
            return int(self._files.info(path)["size"])
        return None

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        try:
            opened = self._files.open(path, "wb")
        except FileNotFoundError:
            # Only after a failure: on object stores makedirs would create a bucket from a misspelt name.
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            opened = self._files.open(path, "wb")
        with opened as file:
            yield file

    def staging(self, folder: str) -> str:
        return folder

    def publish(self, staging: str, folder: str) -> None:
        pass

    def remove(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(folder, recursive=True)

    def fetch(self, path: str, to: Path) -> None:
        self._files.get_file(path, str(to))


def is_url(place: str) -> bool:
    """Return True for a URL, False for a path."""
    return "://" in place


def open_storage(place: str) -> Storage:
    """Open the storage of a folder or of a URL such as ``s3://bucket/run``, of any fsspec protocol.

    Raises:
        ConfigError: fsspec or the driver of the URL is not installed, or refuses the URL.
    """
    return UrlStorage(place) if is_url(place) else Storage(place)
