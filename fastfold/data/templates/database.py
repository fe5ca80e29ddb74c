"""A folder of the PDB's mmCIF files, and lists of those that are obsolete and of their dates."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections import OrderedDict
from datetime import date
from pathlib import Path

from fastfold.data.templates.entry import Entry
from fastfold.data.templates.outcome import TemplateSkipped
from fastfold.errors import InputError
from fastfold.protein.io.cif_tables import read_cif_tables
from fastfold.utils.text_files import PathLike, read_json_object, read_text_bytes, split_lines

_LIMIT = 1 << 30
_KEPT = 16
"""Entries that are kept in memory: several hits are often of one entry, and chains of a complex share templates."""
_TOP, _REVISIONS = 1 << 16, "_pdbx_audit_revision_history"
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)$", re.ASCII)


class MmcifFolder:
    """Finds and reads entries by their PDB id.

    Args:
        folder: The folder. An entry ``1abc`` is ``1abc.cif`` or ``1abc.cif.gz`` there, or in the folder ``ab`` (as the
            PDB's archive is divided).
        obsolete: The PDB's list of obsolete entries (``obsolete.dat``); None for ``obsolete.dat`` in the folder or next
            to it (as AlphaFold's script puts it), if there is one.
        release_dates: See :func:`read_release_dates`; they spare reading entries that are too new. None for none.
        official_errors: Whether two errors of the official program are repeated, to compare with it: atoms behind a
            place with several residue types are put one residue too early
            (:class:`fastfold.data.templates.entry.Entry`), and where a hit is aligned anew, what has no counterpart
            gets the atoms of the chain's last residue.
        kept: Entries that are kept in memory.

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
            raise InputError("no such folder; give the one that holds the PDB's mmCIF files", path=folder)
        if obsolete is None:
            beside = (self.folder / "obsolete.dat", self.folder.parent / "obsolete.dat")
            obsolete = next((path for path in beside if path.is_file()), None)
        self.replacements = {} if obsolete is None else read_obsolete(obsolete)
        self.release_dates = {} if release_dates is None else read_release_dates(release_dates)
        self.official_errors, self._kept = official_errors, kept
        self._entries: OrderedDict[str, Entry | TemplateSkipped] = OrderedDict()
        self._file_dates: dict[str, date | None] = {}

    def current_id(self, pdb_id: str) -> str:
        """The id under which an entry is looked for: that of its successor, if it is obsolete.

        Raises:
            TemplateSkipped: It was withdrawn without one.
        """
        if pdb_id not in self.replacements:
            return pdb_id
        successor = self.replacements[pdb_id]
        if successor is None:
            raise TemplateSkipped("withdrawn", "the PDB has withdrawn this entry")
        return pdb_id if pdb_id in self.release_dates else successor

    def entry(self, pdb_id: str) -> Entry:
        """The entry of this id.

        Raises:
            TemplateSkipped: Its file is not there, or cannot be used.
            InputError: A disk or a network failed; which templates there are must not depend on that.
        """
        found = self._entries.pop(pdb_id, None)
        if found is None:
            found = self._read(pdb_id)
        self._entries[pdb_id] = found
        while len(self._entries) > self._kept:
            self._entries.popitem(last=False)
        if isinstance(found, TemplateSkipped):
            raise TemplateSkipped(found.reason, str(found))
        return found

    def released(self, pdb_id: str) -> date | None:
        """Release date of an entry: the listed one, else its file's, which is remembered; None if it has none.

        Raises:
            TemplateSkipped: Its file is not there, or has to be read and cannot be.
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

    def _path(self, pdb_id: str) -> Path | None:
        """The entry's file, if there is one."""
        middle = self.folder / pdb_id[1:3]
        names = [base / f"{pdb_id}.cif{end}" for base in (self.folder, middle) for end in ("", ".gz")]
        return next((path for path in names if path.is_file()), None)

    def _read(self, pdb_id: str) -> Entry | TemplateSkipped:
        """The entry, or why it cannot be used."""
        path = self._path(pdb_id)
        if path is None:
            return TemplateSkipped(
                "missing file", f"there is no {pdb_id}.cif or {pdb_id}.cif.gz in {self.folder}"
            )
        try:
            lines = split_lines(read_text_bytes(path, limit=_LIMIT).decode("latin-1"))
            return Entry(lines, path=path, alternatives_count=self.official_errors)
        except InputError as error:
            if error.temporary:
                raise
            return TemplateSkipped("unreadable", str(error))


def _date_at_the_top(path: Path) -> str | None:
    """An entry's oldest revision, if a look at the beginning of its file tells it; the PDB's files have it there."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            lines = split_lines(file.read(_TOP).decode("latin-1"))
        first = next(i for i, line in enumerate(lines) if line.startswith(f"{_REVISIONS}."))
        end = next(i for i in range(first, len(lines)) if lines[i].startswith("#"))
        tables = read_cif_tables(lines[:end], (_REVISIONS,), path=path)[0]
        return min(text for text in tables[_REVISIONS].column("revision_date") if text)
    except (OSError, EOFError, zlib.error, StopIteration, ValueError, KeyError, InputError):
        return None  # reading all of it says what is wrong, or finds it farther down


def read_obsolete(path: PathLike) -> dict[str, str | None]:
    """Reads the PDB's list of obsolete entries.

    Args:
        path: Lines such as ``OBSLTE    31-JUL-94 116L     216L``.

    Returns:
        For each obsolete id in lower case, its first successor, or None if it has none.

    Raises:
        InputError: The file cannot be read, or has no such line.
    """
    found: dict[str, str | None] = {}
    lines = split_lines(read_text_bytes(path, limit=_LIMIT).decode("latin-1"))
    for line in lines:
        words = line.split()
        if words[:1] == ["OBSLTE"] and len(words) > 2:
            found[words[2].lower()] = words[3].lower() if len(words) > 3 else None
    if not found and any(line.strip() for line in lines):
        raise InputError("is not the PDB's list of obsolete entries (no line 'OBSLTE')", path=path)
    return found


def read_release_dates(path: PathLike) -> dict[str, date]:
    """Reads release dates.

    Args:
        path: Lines such as ``1abc:2001-02-03``; or, where the name ends in ``.json``, a JSON object of objects with
            ``release_date`` by id (OpenFold's ``mmcif_cache.json``).

    Returns:
        The dates by id in lower case.

    Raises:
        InputError: The file cannot be read, or a line or an object is none of these.
    """
    if os.fspath(path).lower().removesuffix(".gz").endswith(".json"):
        return _dates_of_json(path)
    found = {}
    lines = split_lines(read_text_bytes(path, limit=_LIMIT).decode("latin-1"))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, _, text = line.partition(":")
        released = parse_date(text)
        if released is None:
            raise InputError("not a line such as 1abc:2001-02-03", path=path, line=number)
        found[name.strip().lower()] = released
    return found


def _dates_of_json(path: PathLike) -> dict[str, date]:
    table = read_json_object(path, "PDB ids to objects with release_date", limit=_LIMIT)
    found = {}
    for name, data in table.items():
        released = parse_date(str(data.get("release_date"))) if isinstance(data, dict) else None
        if released is None:
            raise InputError("has no release_date such as 2001-02-03", path=path, record=name)
        found[name.lower()] = released
    return found


def parse_date(text: str) -> date | None:
    """A date written as ``YYYY-MM-DD``, None if it is not one."""
    match = _DATE.match(text.strip())
    try:
        return None if match is None else date(*map(int, match.groups()))
    except ValueError:
        return None
