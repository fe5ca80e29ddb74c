"""The marker that says that a target is finished.

A target's completion marker is written after all of its files and holds their sizes and checksums: a crash between
two files, or a later run that got half way, never leaves anything that passes for a finished target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastfold.data.targets import safe_stem
from fastfold.utils.atomic_files import output_error, write_atomic
from fastfold.utils.hashing import file_digest

_MARKER_VERSION = 1


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
