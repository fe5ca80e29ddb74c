"""Folder of results, to which every run adds: ownership of files, finished predictions, and locks.

Each prediction (a network, a seed and the settings that determine its results) has separate files, for example
``<stem>_rank_001_<network>_seed_0.pdb``, and a record of their sizes and checksums. The records are in
the hidden folder ``.fastfold``, with a folder for each target:

- ``target.json``: the record and the sequences that own the target's stem.
- ``<prediction>.json``: a finished prediction.
- ``<prediction>.new``: a folder with the files and the record of a new prediction. It is renamed into its place when it
  is complete on the disk. From then on the prediction is finished, and any process may move the files to their places.

Files are removed only on the user's request, and every change holds a lock of the folder. Therefore several processes
can use one folder and be killed at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from filelock import Timeout

from fastfold.data.targets import Target, marked_stem, safe_stem
from fastfold.errors import InputError, PlaceError, WriteError
from fastfold.inference.config import FolderFormat, OutputFormat
from fastfold.inference.output.file_names import fastfold_name, file_name
from fastfold.inference.output.score_files import is_number
from fastfold.protein.metrics.scores import SUMMARY_SCORES
from fastfold.utils.atomic_files import (
    output_error,
    prepare_output_directory,
    sweep_temporary,
    temporary_name,
    write_atomic,
)
from fastfold.utils.foreign_text import json_object_or_none
from fastfold.utils.hashing import file_digest, input_hash
from fastfold.utils.locks import held

STATE = ".fastfold"  #: Name of the hidden folder with the records
_VERSION = 2
_PENDING = ".new"


@dataclass(frozen=True)
class PredictionRecord:
    """Record of a finished prediction and its files."""

    id: str  #: Hash of everything that the results depend on, 64 hexadecimal digits
    #: Part of the file names after target and rank: ``<network>_seed_<n>``, with eight digits of ``id`` if that name
    #: is taken
    key: str
    #: Size in bytes and SHA-256 of each file by its ending (``.pdb``, ``_scores.json``)
    files: Mapping[str, tuple[int, str]]
    #: Values by which predictions are ranked and listed: ``model``, ``seed``, ``plddt``, ``ptm`` and so on
    scores: Mapping[str, Any]
    rank: int = 0  #: Rank among the target's predictions, from 1


Ranking = Callable[[Sequence[Mapping[str, Any]]], Sequence[float]]
"""Function from the scores of a target's predictions to the numbers that rank them; higher is better."""


class ResultsFolder:
    """Output folder of ``fastfold infer``, created if needed, without leftovers of killed processes; or WriteError.

    ``say`` is called with lines for the user. A style of file names (``output_format``) or a layout with folders of
    targets (``per_target``) is None for the folder's own. Results in another style or layout raise WriteError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        say: Callable[[str], None] = lambda _: None,
        output_format: FolderFormat | None = None,
        per_target: bool | None = None,
    ) -> None:
        self.path, self.say = prepare_output_directory(path), say
        if (self.path / STATE).is_symlink():
            raise WriteError(f"{self.path / STATE} is a link to another folder; remove it")
        self.state = prepare_output_directory(self.path / STATE)
        for folder in (self.path, self.state):
            sweep_temporary(folder)
        file = self.state / "format.json"
        with self.locked():
            written = json_object_or_none(file) or {}
            known: Any = written.get("output_format", "fastfold")
            has_folders = written.get("per_target") is True
            if known not in get_args(FolderFormat):
                raise WriteError(f"{file}: unknown format {known!r:.40}; use another output folder")
            self.output_format: FolderFormat = known if output_format is None else output_format
            self.per_target = has_folders if per_target is None else per_target
            if (self.output_format, self.per_target) == (known, has_folders):
                return
            if any(self.state.glob("*/target.json")):
                if self.per_target != has_folders:
                    number, option = ("a", "with") if has_folders else ("no", "without")
                    style = f"with {number} folder per target"
                    remedy = f", or run {option} `folder_per_target`"
                else:
                    has_option = "embeddings" not in (known, self.output_format)
                    style = f"in the format {known}"
                    remedy = f", or `output_format={known}`" if has_option else ""
                raise WriteError(f"{self.path} holds results {style}; give another `out`{remedy}")
            agreed = {"output_format": self.output_format} | ({"per_target": True} if self.per_target else {})
            write_atomic(file, json.dumps(agreed) + "\n")

    @property
    def style(self) -> OutputFormat:
        """Style of the files of predictions."""
        return "colabfold" if self.output_format == "colabfold" else "fastfold"

    def locked(self) -> AbstractContextManager[object]:
        """Lock the folder; reentrant within a process."""
        return held(self.state / "lock", is_reentrant=True)

    def claimed(self, work: str) -> AbstractContextManager[bool]:
        """Yield True if no other process does ``work``, and keep others away meanwhile; a name such as a record's."""
        return _claimed(self.state / f"{work}.lock")

    def target(self, target: Target) -> TargetResults:
        """Return a target's results, under its own stem, or raise WriteError (PlaceError for this one alone)."""
        owner = _owner(target)
        with self.locked():
            for stem in (target.name, marked_stem(target.name, input_hash(owner))):
                # Case is ignored, as on some file systems.
                folder = self.state / stem.casefold()
                known = json_object_or_none(folder / "target.json")
                if folder.is_symlink() or (known is None and any(folder.glob("*.json"))):
                    continue  # damaged, so its owner is unknown
                if known is not None and not _owns(folder, known.get("stem")):
                    continue
                if known is None:
                    _prepare_records(folder)
                    write_atomic(folder / "target.json", json.dumps(owner | {"stem": stem}) + "\n")
                elif {key: known.get(key) for key in owner} != owner:
                    continue
                else:
                    stem = known["stem"]
                sweep_temporary(folder)
                if stem != target.name:
                    self.say(
                        f"{target.name}: {self.path} has results of another record or sequence under this name; the "
                        f"files of this one are named {stem}"
                    )
                return TargetResults(self, stem, folder)
        raise PlaceError(f"{self.state / target.name} is damaged: remove it, or choose another output folder")

    def other_results(self, target: Target) -> TargetResults | None:
        """Return the results of another record or sequence under a target's name; None without any."""
        folder = self.state / target.name.casefold()
        known = json_object_or_none(folder / "target.json")
        if known is None or not _owns(folder, known.get("stem")):
            return None
        owner = _owner(target)
        is_own = {key: known.get(key) for key in owner} == owner
        return None if is_own else TargetResults(self, str(known["stem"]), folder)


@dataclass(frozen=True)
class TargetResults:
    """Predictions of one target in a folder."""

    parent: ResultsFolder  #: The folder
    stem: str  #: Stem of the target's file names
    state: Path  #: Folder of its records

    def records(self) -> list[PredictionRecord]:
        """Return all finished predictions in the order of their last ranks."""
        records = [
            _read_record(path) for path in sorted(self.state.glob("*.json")) if path.name != "target.json"
        ]
        return sorted((record for record in records if record is not None), key=lambda r: (r.rank, r.key))

    def find(self, prediction: str) -> PredictionRecord | None:
        """Return a finished prediction with unchanged files by its ``id``; None if there is none."""
        with self.parent.locked():  # no process renames files meanwhile
            record = _read_record(self.state / f"{prediction}.json")
            if record is None:
                return None
            return record if all(self._whole(record, ending) for ending in record.files) else None

    @property
    def folder(self) -> Path:
        """Folder of the target's files."""
        return self.parent.path / self.stem if self.parent.per_target else self.parent.path

    def path(self, record: PredictionRecord, ending: str) -> Path:
        """Return the path of a prediction's file."""
        return self.folder / self.name(record, ending)

    def name(self, record: PredictionRecord, ending: str) -> str:
        """Return the name of a prediction's file (:func:`fastfold.inference.output.file_names.file_name`)."""
        return file_name(self.stem, record.rank, record.key, ending, self.parent.output_format)

    def claimed(self, prediction: str) -> AbstractContextManager[bool]:
        """Yield True if no other process works on a prediction, and keep others away meanwhile."""
        return _claimed(self.state / f"{prediction}.lock")

    def add(
        self,
        prediction: str,
        name: str,
        files: Mapping[str, str | bytes],
        scores: Mapping[str, Any],
        ranking: Ranking,
    ) -> PredictionRecord:
        """Add a finished prediction by its ``id``, or files to one, and rank all; return it with its rank.

        ``name`` is the preferred key of its files; eight digits of ``id`` are added if another prediction has it.
        ``files`` are contents by ending, and ``scores`` in JSON's types. A WriteError leaves the folder unchanged.
        """
        staged = self.parent.state / temporary_name()
        try:
            staged.mkdir()
            written = {}
            for ending, content in files.items():
                path = staged / f"file{ending}"
                write_atomic(path, content)
                written[ending] = (path.stat().st_size, file_digest(path))
            with self.parent.locked():
                self._settle()
                known = _read_record(self.state / f"{prediction}.json")
                if known is None:
                    known = PredictionRecord(prediction, self._free_key(name, prediction), {}, {})
                kept = {e: v for e, v in known.files.items() if e not in written and self._whole(known, e)}
                record = replace(known, files=kept | written, scores=dict(scores))
                write_atomic(staged / "record.json", _record_json(record))
                os.replace(staged, self.state / f"{prediction}{_PENDING}")
                self._settle()
                self._rank(ranking)
        except OSError as error:
            raise output_error(self.parent.path, "write to", error) from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return next(r for r in self.records() if r.id == prediction)

    def shared(self, ending: str) -> Path:
        """Return the path of a file of all predictions together: ``<stem>_coverage.json`` for example."""
        return self.folder / f"{self.stem}{ending}"

    def write_shared(self, files: Mapping[str, str | bytes]) -> dict[str, Path]:
        """Write files of all predictions together, and return their paths, both by ending, or raise WriteError."""
        with self.parent.locked():
            self._prepare_folder()
            for ending, content in files.items():
                write_atomic(self.shared(ending), content)
        return {ending: self.shared(ending) for ending in files}

    def rank(self, ranking: Ranking) -> list[PredictionRecord]:
        """Rank all predictions, rename their files, and return them best first, or raise WriteError."""
        with self.parent.locked():
            self._settle()
            self._rank(ranking)
            return self.records()

    def remove(self, predictions: Iterable[str]) -> None:
        """Remove predictions, by their ``id``, with their files on the user's request."""
        gone = set(predictions)
        with self.parent.locked():
            self._settle()
            for record in self.records():
                if record.id in gone:
                    for ending in record.files:
                        self.path(record, ending).unlink(missing_ok=True)
                    (self.state / f"{record.id}.json").unlink(missing_ok=True)

    def release(self) -> None:
        """Remove all predictions on the user's request, so that another target can have the name."""
        with self.parent.locked():
            self.remove(record.id for record in self.records())
            (self.state / "target.json").unlink(missing_ok=True)

    def _whole(self, record: PredictionRecord, ending: str) -> bool:
        path, (size, digest) = self.path(record, ending), record.files[ending]
        try:  # the size first, because it is cheap and reveals most damage
            return path.is_file() and path.stat().st_size == size and file_digest(path) == digest
        except OSError:
            return False

    def _settle(self) -> None:
        """Move the files of finished predictions to their places, and then their records."""
        for folder in sorted(self.state.glob(f"*{_PENDING}")):
            record = _read_record(folder / "record.json")
            if record is None or folder.is_symlink():  # foreign: a finished prediction always has a record
                continue
            self._prepare_folder()
            place = _read_record(self.state / f"{record.id}.json")
            record = replace(record, rank=place.rank if place else record.rank or len(self.records()) + 1)
            for ending in record.files:
                # Moved before a process was killed, or an older file.
                with contextlib.suppress(FileNotFoundError):
                    self._replace(folder / f"file{ending}", self.path(record, ending))
            write_atomic(self.state / f"{record.id}.json", _record_json(record))
            shutil.rmtree(folder)

    def _rank(self, ranking: Ranking) -> None:
        records = self.records()
        numbers = ranking([record.scores for record in records])
        pairs = sorted(zip(numbers, records, strict=True), key=lambda pair: (-pair[0], pair[1].key))
        for rank, (_, record) in enumerate(pairs, 1):
            ranked = replace(record, rank=rank)
            for ending in record.files:
                self._rename(record, ranked, ending)
            if rank != record.rank:
                write_atomic(self.state / f"{record.id}.json", _record_json(ranked))

    def _rename(self, record: PredictionRecord, ranked: PredictionRecord, ending: str) -> None:
        """Rename a file to its new rank; find it at any rank if a process was killed meanwhile."""
        old, new = self.path(record, ending), self.path(ranked, ending)
        if new.exists():
            return
        if not old.exists():
            head, _, tail = self.name(record, ending).rpartition(f"_rank_{record.rank:03d}_{record.key}")
            pattern = re.escape(f"{head}_rank_") + r"\d{3,}" + re.escape(f"_{record.key}{tail}")
            names = [name for name in self._names() if re.fullmatch(pattern, name)]
            old = self.folder / min(names, default=old.name)
        with contextlib.suppress(FileNotFoundError):  # removed by the user: it is folded again when requested
            self._replace(old, new)

    def _free_key(self, name: str, prediction: str) -> str:
        """Return an unused key for a new prediction's files, also not used by other programs."""
        pattern = re.compile(re.escape(f"{self.stem}_rank_") + r"\d{3,}" + re.escape(f"_{name}") + r"[._].*")
        if self.parent.output_format == "embeddings":
            pattern = re.compile(re.escape(f"{self.stem}_{name}") + r"\..*")
        names = self._names()
        if self.parent.output_format == "colabfold":
            names = [fastfold_name(one) for one in names]
        is_taken = any(record.key == name for record in self.records()) or any(map(pattern.fullmatch, names))
        return f"{name}_{prediction[:8]}" if is_taken else name

    def _names(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.folder)] if self.folder.is_dir() else []

    def _prepare_folder(self) -> None:
        if self.parent.per_target:
            prepare_output_directory(self.folder)

    def _replace(self, old: Path, new: Path) -> None:
        try:
            os.replace(old, new)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise output_error(new, "write", error) from error


def _prepare_records(folder: Path) -> None:
    try:
        prepare_output_directory(folder)
    except WriteError as error:
        if isinstance(error.__cause__, PermissionError):  # only for this folder
            raise PlaceError(str(error)) from error
        raise


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Yield True if no other process holds the lock of a path, and hold it meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(path, timeout=0))
        except Timeout:
            yield False
            return
        # A process that has the removed file open sees the record, which was written earlier.
        stack.callback(path.unlink, missing_ok=True)
        yield True


def _owner(target: Target) -> dict[str, Any]:
    """Return the record and the sequences by which a target owns its stem."""
    return {"record": target.record, "chains": [chain.sequence for chain in target.chains]}


def _owns(folder: Path, stem: object) -> bool:
    """Return True if a stem is safe and named as the folder of its record."""
    return isinstance(stem, str) and stem == safe_stem(stem) and stem.casefold() == folder.name


def _is_part_of_name(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and not set(text) & set("/\\") and len(text) <= 120


def _record_json(record: PredictionRecord) -> str:
    return json.dumps({"schema_version": _VERSION, **asdict(record)}, indent=1, allow_nan=False) + "\n"


def _read_record(path: Path) -> PredictionRecord | None:
    """Read a record from an untrusted file; None if it is invalid. A score that is not a number raises InputError."""
    entry = json_object_or_none(path)
    if entry is None or entry.get("schema_version") != _VERSION:
        return None
    files, scores, rank = entry.get("files"), entry.get("scores"), entry.get("rank")
    if not (isinstance(files, dict) and isinstance(scores, dict) and type(rank) is int):
        return None
    if not all(map(_is_part_of_name, (entry.get("id"), entry.get("key"), *files))):
        return None
    if not all(map(_is_entry, files.values())):
        return None
    for score in (one.summary for one in SUMMARY_SCORES):
        # A network may lack the score.
        if scores.get(score) is not None and not is_number(scores[score]):
            raise InputError(
                f"expected a number as {score} of a prediction's record, found {scores[score]!r:.60}; remove the "
                "file to make the prediction again",
                path=path,
            )
    entries = {ending: (size, digest) for ending, (size, digest) in files.items()}
    return PredictionRecord(entry["id"], entry["key"], entries, scores, rank)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], str)
