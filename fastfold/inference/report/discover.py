"""Find the predictions in a folder of results from their files.

Files are untrusted: damaged and foreign ones are left out, with a line about the reason.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfold.data.targets import safe_stem
from fastfold.errors import FastFoldError, InputError, first_line
from fastfold.inference.output.file_names import fastfold_name, ranked_target
from fastfold.inference.output.score_files import MAX_SCORES_BYTES, check_scores
from fastfold.inference.output.summary import read_table
from fastfold.utils.foreign_text import parse_json


@contextlib.contextmanager
def leaving_out(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Convert any error of the block to a line that names the left-out item and the reason."""
    try:
        yield
    except Exception as error:  # untrusted data may break any step; other predictions are still shown
        say(f"{name}: left out of the report, {_reason(error)}")


def is_regular(path: Path) -> bool:
    """Return True for a file, not a link, because links could lead out of the folder."""
    return path.is_file() and not path.is_symlink()


def check_size(path: Path, limit: int = MAX_SCORES_BYTES) -> Path:
    """Return the path of a file, or raise ValueError if it is larger than a limit in bytes."""
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"expected at most {limit:,} bytes, found {size:,}")
    return path


def read_json(path: Path, limit: int = MAX_SCORES_BYTES) -> Any:
    """Parse a JSON file, which may come from anywhere, or raise OSError or ValueError."""
    try:
        return parse_json(check_size(path, limit).read_bytes(), path)
    except InputError:
        raise ValueError("it is not JSON") from None


def numbers_of(line: Mapping[str, Any], columns: Iterable[str]) -> dict[str, float]:
    """Return the finite numbers in some columns of a line."""
    numbers = {}
    for column in columns:
        with contextlib.suppress(TypeError, ValueError):
            numbers[column] = float(line.get(column, ""))
    return {column: value for column, value in numbers.items() if math.isfinite(value)}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror}"
    if isinstance(error, ValueError | FastFoldError):
        return str(error)
    return f"it cannot be read: {first_line(error)}"


SCORES = "_scores.json"  #: Ending of the file that identifies a prediction
_RELAXED = ("_relaxed.pdb", "_relaxed.cif")

_LISTED = ("relaxed_energy", "seconds", "peak_memory")


@dataclass(frozen=True)
class FoundPrediction:
    """Prediction in a folder: stems of its files and of its target's, rank if the name has one, and checked scores.

    Files are by the ending of their names. ``listed`` are further numbers from the folder's table, by column.
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
    """Find the predictions in a folder, by target name, the best of each first, or raise InputError.

    ``say`` gets a line about each file that is left out.
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
    predictions = []
    for stem in stems:
        with leaving_out(f"{stem}{SCORES}", say):
            scores = check_scores(read_json(paths[f"{stem}{SCORES}"]))
            target, rank = ranked_target(stem) or (safe_stem(scores["name"]), None)
            # Of the target, or of the prediction.
            for ending in ("_coverage.json", "_coverage.png", "_config.json"):
                name = f"{target}{ending}"
                if ending not in files[stem] and name in own:
                    files[stem][ending] = paths[name]
            line = table.get(stem, {})
            predictions.append(FoundPrediction(stem, target, rank, scores, files[stem], line))
    return sorted(predictions, key=lambda one: (one.target, one.rank or math.inf, one.stem))


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
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _files_by_stem(paths: Mapping[str, Path], stems: list[str]) -> dict[str, dict[str, Path]]:
    """Group files by prediction and ending; a file belongs to the longest stem that it begins with."""
    files: dict[str, dict[str, Path]] = {stem: {} for stem in stems}
    for name, path in paths.items():
        places = [at for at, letter in enumerate(name) if letter in "._"]
        stem = next((name[:at] for at in reversed(places) if name[:at] in files), None)
        if stem is not None:
            files[stem][name[len(stem) :]] = path
    return files


def _table(path: Path) -> dict[str, dict[str, float]]:
    rows = {}
    for line in read_table(path):
        stem = fastfold_name(f"{line.get('files') or ''}.pdb").removesuffix(".pdb")
        rows[stem] = numbers_of(line, _LISTED)
    return rows
