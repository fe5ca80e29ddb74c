"""Folder per target with the files of AlphaFold's own runs, for programs that read those."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from fastfold.errors import PlaceError
from fastfold.inference.output.prediction import multimer_confidence
from fastfold.inference.output.results_folder import PredictionRecord, TargetResults
from fastfold.utils.atomic_files import output_error, temporary_name, write_atomic

_LISTING = "alphafold_files.txt"  #: Record that lists the names of the files in a target's folder


def write_alphafold_folder(results: TargetResults) -> None:
    """Write ``ranked_0.pdb``, ``ranking_debug.json`` and the best prediction's aligned error of a target.

    The results have ColabFold's names, and the folder the name of the target's files. Its earlier files are replaced; a
    folder of another origin is left unchanged.

    Raises:
        PlaceError: A file or folder of another origin has the folder's name.
        WriteError: A file cannot be written.
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
    named = dict(zip(_names(records), records, strict=True))
    scores = {name: record.scores for name, record in named.items()}
    if any(one.get("iptm") is None or one.get("ptm") is None for one in scores.values()):
        return {"plddts": {name: one["plddt"] for name, one in scores.items()}, "order": list(named)}
    return {
        "iptm+ptm": {name: multimer_confidence(one["ptm"], one["iptm"]) for name, one in scores.items()},
        "iptm": {name: one["iptm"] for name, one in scores.items()},
        "order": list(named),
    }


def _names(records: list[PredictionRecord]) -> list[str]:
    """Return AlphaFold's names of predictions: ``model_1_multimer_v3_pred_0``."""
    names: list[str] = []
    for record in records:
        name = f"{record.scores['model']}_pred_{record.scores['seed']}"
        names.append(f"{name}_{record.id[:8]}" if name in names else name)
    return names


def _sources(results: TargetResults, records: list[PredictionRecord]) -> dict[str, Path]:
    """Return the files of a target by their names in the folder."""
    found = {}
    for number, record in enumerate(records):
        if ".pdb" in record.files:  # absent if the structure exceeds the format
            found[f"ranked_{number}.pdb"] = results.path(record, ".pdb")
    for name, record in zip(_names(records[:1]), records, strict=False):
        if "_pae.json" in record.files:
            found[f"pae_{name}.json"] = results.path(record, "_pae.json")
    return found


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
        with contextlib.suppress(
            FileNotFoundError
        ):  # replacing a link by another to the same file leaves both
            temporary.unlink()
