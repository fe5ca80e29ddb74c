"""Folder of the PDB's mmCIF files, list of obsolete entries, and release dates."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections import OrderedDict
from datetime import date
from pathlib import Path

from fastfold.data.templates.entry import TemplateEntry
from fastfold.data.templates.hits import TemplateSkipped
from fastfold.errors import ConfigError, InputError
from fastfold.protein.io.cif_tables import read_cif_tables
from fastfold.utils.foreign_text import read_json_object
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

_LIMIT = 1 << 30
_KEPT = 16  #: Number of entries kept in memory, because hits and chains often share entries
_TOP, _REVISIONS = 1 << 16, "_pdbx_audit_revision_history"
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)$", re.ASCII)


class MmcifFolder:
    """Folder of PDB entries, ``1abc.cif`` or ``1abc.cif.gz`` there or in the folder ``ab`` (as in the PDB's archive).

    The list ``obsolete`` is by default ``obsolete.dat`` in the folder or its parent (as placed by AlphaFold's script),
    if it exists. The ``release_dates`` (:func:`read_release_dates`) avoid reading entries that are too new. At most
    ``kept`` entries stay in memory.

    ``official_errors`` repeats two errors of AlphaFold, for a comparison. Atoms after a place with several residue
    types are shifted by one residue (:class:`fastfold.data.templates.entry.TemplateEntry`). In a hit that is realigned,
    residues without a counterpart get the atoms of the chain's last residue.

    Raises:
        InputError: The folder or a list is missing or unreadable.
    """

    def __init__(
        self,
        folder: PathLike,
        *,
        obsolete: PathLike | None = None,
        release_dates: PathLike | None = None,
        official_errors: bool = False,
        kept: int = _KEPT,
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError("no such folder; give the folder of the PDB's mmCIF files", path=folder)
        if obsolete is None:
            places = (self.folder / "obsolete.dat", self.folder.parent / "obsolete.dat")
            obsolete = next((path for path in places if path.is_file()), None)
        self.replacements = {} if obsolete is None else read_obsolete(obsolete)
        self.release_dates = {} if release_dates is None else read_release_dates(release_dates)
        self.official_errors, self._kept = official_errors, kept
        self._entries: OrderedDict[str, TemplateEntry | TemplateSkipped] = OrderedDict()
        self._file_dates: dict[str, date | None] = {}

    def current_id(self, pdb_id: str) -> str:
        """Return the id of an entry, or of its last successor if it is obsolete.

        Successors of successors are followed, to an entry that is current or has a listed date. Ids that replace each
        other in a circle lead to the last one before the first is repeated.

        Raises:
            TemplateSkipped: It, or its last successor, was withdrawn without a successor.
        """
        seen: list[str] = []
        while pdb_id in self.replacements and pdb_id not in seen:
            successor = self.replacements[pdb_id]
            if successor is None:
                raise TemplateSkipped("withdrawn", f"the PDB has withdrawn {pdb_id} without a successor")
            if pdb_id in self.release_dates:
                return pdb_id
            seen.append(pdb_id)
            pdb_id = successor
        return seen[-1] if pdb_id in seen else pdb_id

    def entry(self, pdb_id: str) -> TemplateEntry:
        """Read the entry of an id.

        Raises:
            TemplateSkipped: Its file is missing or invalid.
            InputError: A disk or network failed, which must not change the templates silently.
        """
        entry = self._entries.pop(pdb_id, None)
        if entry is None:
            entry = self._read_entry(pdb_id)
        self._entries[pdb_id] = entry
        while len(self._entries) > self._kept:
            self._entries.popitem(last=False)
        if isinstance(entry, TemplateSkipped):
            raise TemplateSkipped(entry.reason, str(entry))
        return entry

    def released(self, pdb_id: str) -> date | None:
        """Return an entry's release date, listed or read from its file; None if unknown.

        Raises:
            TemplateSkipped: Its file is missing or invalid, and the date is not listed.
        """
        if pdb_id in self.release_dates:
            if self._path(pdb_id) is None:
                self.entry(pdb_id)
            return self.release_dates[pdb_id]
        if pdb_id not in self._file_dates:
            path = self._path(pdb_id)
            text = None if path is None else _date_at_the_top(path)
            self._file_dates[pdb_id] = parse_date(text or self.entry(pdb_id).release_date)
        return self._file_dates[pdb_id]

    def path(self, pdb_id: str) -> Path:
        """Return the file of an entry.

        Raises:
            TemplateSkipped: It is missing.
        """
        path = self._path(pdb_id)
        if path is None:
            raise TemplateSkipped(
                "missing file", f"{pdb_id}.cif and {pdb_id}.cif.gz are missing in {self.folder}"
            )
        return path

    def _path(self, pdb_id: str) -> Path | None:
        middle = self.folder / pdb_id[1:3]
        names = [base / f"{pdb_id}.cif{end}" for base in (self.folder, middle) for end in ("", ".gz")]
        return next((path for path in names if path.is_file()), None)

    def _read_entry(self, pdb_id: str) -> TemplateEntry | TemplateSkipped:
        try:
            path = self.path(pdb_id)
            return TemplateEntry(_lines(path), path=path, alternatives_count=self.official_errors)
        except TemplateSkipped as skipped:
            return skipped
        except InputError as error:
            if error.temporary:
                raise
            return TemplateSkipped("unreadable", str(error))


def _date_at_the_top(path: Path) -> str | None:
    """Return an entry's oldest revision if the beginning of its file contains it, as in the PDB's files."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            lines = split_lines(file.read(_TOP).decode("latin-1"))
        first = next(i for i, line in enumerate(lines) if line.startswith(f"{_REVISIONS}."))
        end = next(i for i in range(first, len(lines)) if lines[i].startswith("#"))
        tables = read_cif_tables(lines[:end], (_REVISIONS,), path=path)[0]
        return min(text for text in tables[_REVISIONS].column("revision_date") if text)
    except (OSError, EOFError, zlib.error, StopIteration, ValueError, KeyError, InputError):
        return None  # reading the whole file explains the problem, or finds the date


def _lines(path: PathLike) -> list[str]:
    return split_lines(read_text_bytes(path, limit=_LIMIT).decode("latin-1"))


def read_obsolete(path: PathLike) -> dict[str, str | None]:
    """Read the first successor, or None, of each entry in the PDB's list of obsolete entries.

    Lines are such as ``OBSLTE    31-JUL-94 116L     216L``; ids become lower case.

    Raises:
        InputError: The file cannot be read, or lacks such lines.
    """
    successors: dict[str, str | None] = {}
    lines = _lines(path)
    for line in lines:
        words = line.split()
        if words[:1] == ["OBSLTE"] and len(words) > 2:
            successors[words[2].lower()] = words[3].lower() if len(words) > 3 else None
    if not successors and any(line.strip() for line in lines):
        raise InputError("expected the PDB's list of obsolete entries (lines 'OBSLTE')", path=path)
    return successors


def read_release_dates(path: PathLike) -> dict[str, date]:
    """Read release dates by id in lower case, from lines such as ``1abc:2001-02-03``.

    A file with suffix ``.json`` has an object with ``release_date`` for each id (OpenFold's ``mmcif_cache.json``).

    Raises:
        InputError: The file cannot be read, or a line or an object is invalid.
    """
    dates = {}
    if os.fspath(path).lower().removesuffix(".gz").endswith(".json"):
        table = read_json_object(path, "PDB ids to objects with release_date", limit=_LIMIT)
        for name, data in table.items():
            released = parse_date(str(data.get("release_date"))) if isinstance(data, dict) else None
            if released is None:
                raise InputError("lacks a release_date such as 2001-02-03", path=path, record=name)
            dates[name.lower()] = released
        return dates
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        name, _, text = line.partition(":")
        released = parse_date(text)
        if released is None:
            raise InputError("expected a line such as 1abc:2001-02-03", path=path, line=number)
        dates[name.strip().lower()] = released
    return dates


def parse_date(text: str) -> date | None:
    """Parse a date written as ``YYYY-MM-DD``; return None for other text."""
    match = _DATE.match(text.strip())
    try:
        return None if match is None else date(*map(int, match.groups()))
    except ValueError:
        return None


def require_date(setting: str, text: str) -> date:
    """Parse the date of a setting.

    Raises:
        ConfigError: The text is not a date ``YYYY-MM-DD``.
    """
    parsed = parse_date(text)
    if parsed is None:
        raise ConfigError(f"{setting} must be a date such as 2018-04-30, not {text!r}")
    return parsed
