"""Files of a whole target: a folder with those of AlphaFold's own runs, and an archive for downloads."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

from fastfold.errors import PlaceError
from fastfold.inference.output.file_names import ARCHIVE
from fastfold.inference.output.prediction import multimer_confidence
from fastfold.inference.output.results_folder import PredictionRecord, TargetResults
from fastfold.utils.atomic_files import output_error, replacing, temporary_name, write_atomic
from fastfold.utils.hashing import file_digest, input_hash

_LISTING = "alphafold_files.txt"  #: Record that lists the names of the files in a target's folder


def write_alphafold_folder(results: TargetResults) -> None:
    """Write ``ranked_0.pdb``, ``ranking_debug.json`` and the best prediction's aligned error of a target.

    The results have ColabFold's names, and the folder the name of the target's files. Its earlier files are replaced. A
    PlaceError tells that a file or folder of another origin has the name, which is left unchanged.
    """
    folder, listing = results.parent.path / results.stem, results.state / _LISTING
    with results.parent.locked():
        records = results.records()
        if not records:
            return
        if folder.is_symlink() or (not listing.exists() and folder.exists()):
            raise PlaceError(f"{folder} was not made by FastFold; remove it to get AlphaFold's files there")
        try:
            known = listing.read_text().splitlines() if listing.exists() else []
            sources = _sources(results, records)
            debug = "ranking_debug.json"
            write_atomic(listing, "".join(f"{name}\n" for name in (*sources, debug)))
            folder.mkdir(exist_ok=True)
            for name in set(known) - set(sources) - {debug}:
                (folder / Path(name).name).unlink(missing_ok=True)
            for name, source in sources.items():
                _share(source, folder / name)
            write_atomic(folder / debug, json.dumps(ranking_debug(records), indent=4) + "\n")
        except OSError as error:
            raise output_error(folder, "write to", error) from error


def ranking_debug(records: list[PredictionRecord]) -> dict[str, object]:
    """Return the content of AlphaFold's ``ranking_debug.json`` for predictions, best first."""
    scores = dict(zip(_names(records), (record.scores for record in records), strict=True))
    if any(one.get("iptm") is None or one.get("ptm") is None for one in scores.values()):
        return {"plddts": {name: one["plddt"] for name, one in scores.items()}, "order": list(scores)}
    return {
        "iptm+ptm": {name: multimer_confidence(one["ptm"], one["iptm"]) for name, one in scores.items()},
        "iptm": {name: one["iptm"] for name, one in scores.items()},
        "order": list(scores),
    }


def _names(records: list[PredictionRecord]) -> list[str]:
    """Return AlphaFold's names of predictions: ``model_1_multimer_v3_pred_0``."""
    names: list[str] = []
    for record in records:
        name = f"{record.scores['model']}_pred_{record.scores['seed']}"
        names.append(f"{name}_{record.id[:8]}" if name in names else name)
    return names


def _sources(results: TargetResults, records: list[PredictionRecord]) -> dict[str, Path]:
    sources = {
        f"ranked_{number}.pdb": results.path(record, ".pdb")
        for number, record in enumerate(records)
        if ".pdb" in record.files  # absent if the structure exceeds the format
    }
    if "_pae.json" in records[0].files:
        sources[f"pae_{_names(records[:1])[0]}.json"] = results.path(records[0], "_pae.json")
    return sources


def _share(source: Path, place: Path) -> None:
    """Link a file under a second name, or copy it on file systems without links."""
    temporary = place.parent / temporary_name()
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)  # replacing a link by another to the same file leaves both


_SHARED = ("_coverage.json", "_coverage.png")
"""Endings of the files of a target that are not of one prediction."""


def renew_result_archive(results: TargetResults, *, is_wanted: bool) -> bool:
    """Write a target's archive, ``<id>.result.zip``, if it is wanted or exists, and differs from the files.

    Return True if it was written. The archive is reproducible, and has the files of the target and of all its
    predictions. A WriteError tells that it cannot be written.
    """
    path = results.parent.path / f"{results.stem}{ARCHIVE}"
    if not (is_wanted or path.is_file()):
        return False
    with results.parent.locked():  # no process renames files meanwhile
        records = results.records()
        digests = {
            file: digest
            for record in records
            for ending, (_, digest) in record.files.items()
            if (file := results.path(record, ending)).is_file()
        }
        shared = filter(Path.is_file, map(results.shared, _SHARED))
        digests |= {file: file_digest(file) for file in shared}
        comment = input_hash([(file.name, digest) for file, digest in digests.items()]).encode()
        if not records or _comment(path) == comment:
            return False
        with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.comment = comment
            for file in digests:
                archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return True


def _comment(path: Path) -> bytes:
    """Return the comment of an archive, the hash of its content; empty without a valid archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.comment
    except (OSError, zipfile.BadZipFile):
        return b""
