"""All files of a target in one archive, for downloads."""

from __future__ import annotations

import zipfile
from pathlib import Path

from fastfold.inference.output.results_folder import TargetResults
from fastfold.utils.atomic_files import replacing

ENDING = ".result.zip"
_SHARED = ("_coverage.json", "_coverage.png")
"""Endings of the files of a target that are not of one prediction."""


def archive_path(results: TargetResults) -> Path:
    """Return the path of a target's archive, ``<id>.result.zip``."""
    return results.parent.path / f"{results.stem}{ENDING}"


def write_result_archive(results: TargetResults) -> Path:
    """Write an archive with the files of a target and all its predictions, the same bytes for the same files.

    Raises:
        WriteError: The archive cannot be written, or a file cannot be read.
    """
    path = archive_path(results)
    files = [results.path(record, ending) for record in results.records() for ending in record.files]
    files += [shared for ending in _SHARED if (shared := results.shared(ending)).is_file()]
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return path
