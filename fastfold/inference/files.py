"""Files that are either whole or not there, and the marker that says that a target is finished.

Every file is written beside its place and then renamed into it. A target's completion marker is written after
all of its files and holds their sizes and checksums: a crash between two files, or a later run that got half
way, never leaves anything that passes for a finished target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.data.targets import safe_stem
from fastfold.errors import OutputError

_MARKER_VERSION = 1
# O_BINARY exists on Windows only, where line ends would be changed without it.
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or choose another output folder",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another output folder",
    errno.EFBIG: "the file is larger than this system allows; choose another output folder",
    errno.EROFS: "the file system is read-only; choose another output folder",
    errno.EACCES: "permission denied; choose an output folder that you may write to",
    errno.EPERM: "not permitted; choose an output folder that you may write to",
    errno.ENOTDIR: "part of the path is a file, not a folder; choose another output folder",
    errno.EEXIST: "it is a file, not a folder; choose another output folder",
    errno.EISDIR: "a folder stands where the file belongs; remove it or choose another output folder",
    errno.ENOENT: "the folder does not exist; create it or choose another output folder",
    errno.ENAMETOOLONG: "the name is too long for this file system; give the target a shorter name",
}


def _output_error(path: Path, action: str, error: OSError | ValueError) -> OutputError:
    number = error.errno if isinstance(error, OSError) else None
    fallback = f"{getattr(error, 'strerror', None) or error}; choose another output folder"
    return OutputError(f"cannot {action} {str(path)!r}: {_REMEDIES.get(number or 0, fallback)}")


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Writes a file so that its path holds the old contents or all of the new ones, whatever happens.

    The data go to a temporary file in the same folder, to the disk, and then under the final name.

    Args:
        path: Where the file shall be; what is there is replaced.
        data: Its contents; text is encoded as UTF-8.

    Raises:
        OutputError: The file cannot be written; names the path and what to do. No temporary file is left.
    """
    path = Path(path)
    payload = data.encode("utf-8") if isinstance(data, str) else data
    # Its own short name: a name derived from the final one could be too long where the final one is not.
    temporary = path.parent / f".fastfold-{secrets.token_hex(8)}.tmp"
    try:
        # Not tempfile, whose files nobody but their owner may read: results follow the user's umask.
        descriptor = os.open(temporary, _CREATE, 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:  # an interrupt by the user leaves nothing behind either
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise _output_error(path, "write", error) from error
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where the system can do that (not on Windows)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def prepare_output_directory(path: str | os.PathLike[str]) -> Path:
    """Creates the output folder and tries that files can be made in it, before hours of work are spent.

    Args:
        path: The folder; parents are created as needed.

    Returns:
        The same path.

    Raises:
        OutputError: It cannot be created or written to; names the path and what to do.
    """
    path = Path(path)
    probe = path / f".fastfold-{secrets.token_hex(8)}.tmp"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except (OSError, ValueError) as error:
        raise _output_error(path, "use output folder", error) from error
    return path


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
            raise _output_error(directory, "finish the target in", error) from error
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
                raise _output_error(directory / file["name"], "remove", error) from error
