"""The marker that says that a target is finished.

A target's completion marker is written after all of its files and holds their sizes and checksums: a crash between
two files, or a later run that got half way, never leaves anything that passes for a finished target.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.atomic_files import output_error, write_atomic
from fastfold.data.targets import safe_stem

_MARKER_VERSION = 1


def input_hash(*values: Any) -> str:
    """A digest of inputs and settings that is the same in every process and on every machine.

    Args:
        values: Any nesting of mappings with text keys, lists, tuples, sets, dataclasses, text, bytes, paths,
            numbers, booleans, None and numpy arrays. The order of a mapping or a set does not count; a tuple
            equals a list.

    Returns:
        64 hexadecimal digits of SHA-256.

    Raises:
        TypeError: A value of another type, whose text form might change from run to run.
    """
    canonical = json.dumps(_canonical(values), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _canonical(value: Any) -> Any:
    """The value in JSON's types, other types marked so that none equals another."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, np.generic):
        return _canonical(value.item())
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("input_hash takes no arrays of objects")
        # Little-endian, so that the machine's own byte order does not count.
        data = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        digest = hashlib.sha256(data).hexdigest()
        return {"\0array": [value.dtype.newbyteorder("<").str, list(value.shape), digest]}
    if isinstance(value, bytes):
        return {"\0bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, os.PathLike):
        return {"\0path": os.fspath(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _canonical(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("input_hash takes mappings with text keys only")
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {"\0set": sorted((_canonical(item) for item in value), key=json.dumps)}
    raise TypeError(f"input_hash cannot take a {type(value).__name__}")


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's contents as 64 hexadecimal digits, read in pieces.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class CompletionMarker:
    """The file ``<name>_complete.json`` in a target's folder: which files a finished run left, made of what.

    A marker is read as data from anywhere: what is not a sound marker counts as none, and only plain names of
    files of the same target in the same folder are ever removed on its word.
    """

    @staticmethod
    def path(directory: str | os.PathLike[str], name: str) -> Path:
        """Where the marker of the target ``name`` stands."""
        return Path(directory) / f"{safe_stem(name)}_complete.json"

    @staticmethod
    def is_complete(directory: str | os.PathLike[str], name: str, digest: str) -> bool:
        """Whether a run with this digest finished the target and all its files are still as it wrote them.

        Args:
            directory: The output folder.
            name: The target's name.
            digest: :func:`input_hash` of the target's inputs and settings.
        """
        marker = _read_marker(CompletionMarker.path(directory, name))
        if marker is None or marker["digest"] != digest:
            return False
        paths = [Path(directory) / file["name"] for file in marker["files"]]
        try:
            # All sizes first: they are cheap and show most damage.
            return all(
                path.is_file() and path.stat().st_size == file["bytes"]
                for path, file in zip(paths, marker["files"], strict=True)
            ) and all(
                file_digest(path) == file["sha256"] for path, file in zip(paths, marker["files"], strict=True)
            )
        except OSError:
            return False

    @staticmethod
    def mark_complete(
        directory: str | os.PathLike[str],
        name: str,
        digest: str,
        files: Iterable[str | os.PathLike[str]],
    ) -> None:
        """Declares a target finished; to be called when all of its files have been written.

        Files of an earlier run of the same target that are not among the new ones are removed first, the
        marker comes last: an interruption in between makes the target count as unfinished.

        Args:
            directory: The output folder.
            name: The target's name.
            digest: :func:`input_hash` of the target's inputs and settings.
            files: The files, all directly in ``directory``.

        Raises:
            OutputError: A file is not there, or the marker cannot be written.
            ValueError: A file does not stand in ``directory``.
        """
        directory = Path(directory)
        paths = sorted({Path(file) for file in files})
        if outside := [path for path in paths if path.parent.resolve() != directory.resolve()]:
            raise ValueError(f"{outside[0]} is not a file of the folder {directory}")
        try:
            entries = [
                {"name": path.name, "bytes": path.stat().st_size, "sha256": file_digest(path)}
                for path in paths
            ]
        except OSError as error:
            raise output_error(directory, "finish the target in", error) from error
        marker_path = CompletionMarker.path(directory, name)
        _remove_stale(directory, safe_stem(name), _read_marker(marker_path), {path.name for path in paths})
        marker = {"schema_version": _MARKER_VERSION, "name": name, "digest": digest, "files": entries}
        write_atomic(marker_path, json.dumps(marker, indent=1) + "\n")


def _read_marker(path: Path) -> dict[str, Any] | None:
    """The marker at ``path``; None if there is none or it is not one of ours."""
    try:
        marker = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict) or marker.get("schema_version") != _MARKER_VERSION:
        return None
    files = marker.get("files")
    sound = isinstance(files, list) and all(
        isinstance(file, dict)
        and isinstance(file.get("name"), str)
        and not set(file["name"]) & set("/\\\0")
        and isinstance(file.get("bytes"), int)
        and isinstance(file.get("sha256"), str)
        for file in files
    )
    return marker if sound and isinstance(marker.get("digest"), str) else None


def _remove_stale(directory: Path, stem: str, marker: dict[str, Any] | None, keep: set[str]) -> None:
    """Removes the files of an earlier run, by its marker, that the new run has not written."""
    for file in marker["files"] if marker else ():
        # Only files that bear the target's name: a marker from elsewhere must not remove anything else.
        if file["name"] not in keep and file["name"].startswith(f"{stem}_"):
            try:
                os.unlink(directory / file["name"])
            except FileNotFoundError:
                continue
            except OSError as error:
                raise output_error(directory / file["name"], "remove", error) from error
