"""All files of a target in one archive, for downloads."""

from __future__ import annotations

import zipfile
from pathlib import Path

from fastfold.inference.output.results_folder import TargetResults
from fastfold.utils.atomic_files import replacing

ENDING = ".result.zip"


def archive_path(results: TargetResults) -> Path:
    """Return the path of a target's archive, ``<id>.result.zip``."""
    return results.parent.path / f"{results.stem}{ENDING}"


def write_result_archive(results: TargetResults) -> Path:
    """Write an archive with the files of all predictions of a target, the same bytes for the same files.

    Raises:
        WriteError: The archive cannot be written, or a file cannot be read.
    """
    path = archive_path(results)
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for record in results.records():
            for ending in record.files:
                member = zipfile.ZipInfo(results.name(record, ending))
                archive.writestr(member, results.path(record, ending).read_bytes(), zipfile.ZIP_DEFLATED)
    return path
