"""Find the predictions in a folder of results from their files.

Files are untrusted: damaged and foreign ones are left out, with a line about the reason.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.errors import InputError
from fastfold.inference.output.file_names import fastfold_name
from fastfold.inference.output.written_scores import check_scores
from fastfold.inference.report.guard import check_size, leaving_out, numbers_of, read_table

SCORES = "_scores.json"  #: Ending of the file that identifies a prediction
_RELAXED = ("_relaxed.pdb", "_relaxed.cif")

_RANK = re.compile(r"(?P<target>.+)_rank_(?P<rank>\d{1,9})_.+")
_LISTED = ("relaxed_energy", "seconds", "peak_memory")


@dataclass(frozen=True)
class FoundPrediction:
    """Prediction in a folder, with the stems of its files and of its target's, and its rank, if the name has one.

    ``scores`` is the content of the scores file, with ``name``, ``model``, ``seed``, ``sequences`` and ``plddt``. Files
    are by the ending of their names. ``listed`` are further numbers from the folder's table, by column.
    """

    stem: str
    target: str
    rank: int | None
    scores: Mapping[str, Any]
    files: Mapping[str, Path]
    listed: Mapping[str, float]

    @property
    def structure(self) -> Path | None:
        """Structure to show: the relaxed one if available."""
        endings = (*_RELAXED, ".pdb", ".cif")
        return next((self.files[ending] for ending in endings if ending in self.files), None)

    @property
    def has_relaxed_structure(self) -> bool:
        """True if the structure to show is relaxed, in any style of names."""
        return any(ending in self.files for ending in _RELAXED)


def find_predictions(
    directory: Path, say: Callable[[str], None] = lambda line: None
) -> list[FoundPrediction]:
    """Find the predictions in a folder, by target name, the best of each first.

    ``say`` gets a line about each file that is left out.

    Raises:
        InputError: The folder cannot be read.
    """
    try:
        names = _regular_files(directory, say)
        paths = {fastfold_name(name): directory / name for name in names}
        for folder in _target_folders(directory):
            paths |= {name: folder / name for name in _regular_files(folder, say)}
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}; give a folder of results", path=directory
        ) from error
    names, own = list(paths), set(paths)
    stems = [name.removesuffix(SCORES) for name in names if name.endswith(SCORES)]
    files = _files_by_stem(paths, stems)
    table = _table(directory / "summary.tsv") if "summary.tsv" in names else {}
    found = []
    for stem in stems:
        with leaving_out(f"{stem}{SCORES}", say):
            scores = check_scores(json.loads(check_size(paths[f"{stem}{SCORES}"]).read_bytes()))
            match = _RANK.fullmatch(stem)
            target = match["target"] if match else str(scores["name"])
            # Of the target, or of the prediction.
            for ending in ("_coverage.json", "_coverage.png", "_config.json"):
                name = f"{target}{ending}"
                if ending not in files[stem] and name in own:
                    files[stem][ending] = paths[name]
            line = table.get(stem, {})
            rank = int(match["rank"]) if match else None
            found.append(FoundPrediction(stem, target, rank, scores, files[stem], line))
    return sorted(found, key=lambda one: (one.target, one.rank or math.inf, one.stem))


def _target_folders(directory: Path) -> list[Path]:
    """Return the folders of single targets in a folder: each has scores files that begin with its name."""
    folders = (Path(entry.path) for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
    shown = (folder for folder in folders if _is_text(folder.name) and not folder.name.startswith("."))
    return sorted(f for f in shown if any(f.glob(f"{glob.escape(f.name)}_*{SCORES}")))


def _regular_files(directory: Path, say: Callable[[str], None]) -> list[str]:
    """Return names of regular files in a folder, sorted; links could lead out of it."""
    names = []
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if not _is_text(entry.name) or entry.is_dir(follow_symlinks=False):
            continue
        if entry.is_file(follow_symlinks=False):
            names.append(entry.name)
        else:
            say(f"{entry.name}: left out of the report, it is not a regular file")
    return names


def _is_text(name: str) -> bool:
    """Return True if a name is valid UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _files_by_stem(paths: Mapping[str, Path], stems: list[str]) -> dict[str, dict[str, Path]]:
    """Group files by prediction and ending; a file belongs to the longest stem that it begins with."""
    found: dict[str, dict[str, Path]] = {stem: {} for stem in stems}
    for name, path in paths.items():
        places = [at for at, letter in enumerate(name) if letter in "._"]
        stem = next((name[:at] for at in reversed(places) if name[:at] in found), None)
        if stem is not None:
            found[stem][name[len(stem) :]] = path
    return found


def _table(path: Path) -> dict[str, dict[str, float]]:
    """Read the numbers of ``summary.tsv`` by file stem; empty without a valid table."""
    found = {}
    for line in read_table(path):
        stem = fastfold_name(f"{line.get('files') or ''}.pdb").removesuffix(".pdb")
        found[stem] = numbers_of(line, _LISTED)
    return found
