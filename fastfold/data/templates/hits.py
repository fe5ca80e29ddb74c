"""Hits of template searches, parsed from the output of HHsearch and hmmsearch, and their outcomes.

HHsearch's output (``.hhr``) is a table, then a paragraph for each hit. It begins with ``No <number>``, the hit's name
after ``>``, and a line of scores. Blocks of the alignment follow, whose rows start with the first residue of template
or query, counted from 1 (HH-suite user guide, "Output alignment format")::

    Q query             1 KELRC-QCIK   10 (70)
    T 4XDX_A            1 KELRCAQCIK   11 (70)

hmmsearch writes an alignment (``-A``, Stockholm) of rows named ``<PDB id>_<chain>/<first>-<last>``; their ``#=GS … DE``
lines have the header of ``pdb_seqres.txt`` (``mol:protein length:108  …``). Match states, one for each residue of the
query, are upper case or ``-``; insertions are lower case or ``.`` (HMMER user guide).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from fastfold.errors import InputError
from fastfold.utils.foreign_text import plain_float
from fastfold.utils.text_files import PathLike, split_lines

_PDB_CHAIN = re.compile(r"([a-zA-Z0-9]{4})_([a-zA-Z0-9.]+)")


@dataclass(frozen=True)
class TemplateHit:
    """Alignment of the query with a part of a template's sequence, from a search."""

    index: int  #: Number of the hit in the search's output, from 1
    name: str  #: Name of the hit, which begins with ``<PDB id>_<chain>``
    aligned_cols: int  #: Number of columns in which both have a residue, as counted by AlphaFold
    sum_probs: float | None  #: HHsearch's sum of posterior probabilities; None for hmmsearch
    query: str  #: Letters of the query, ``-`` for a gap
    #: Letters of the template, upper case, ``-`` for a gap. HHsearch's are as long as ``query``; hmmsearch's include
    #: insertions.
    hit_sequence: str
    #: For each column, the residue's place in the query from 0, or -1 for a gap
    indices_query: tuple[int, ...]
    #: For each column, the residue's place in the template's listed sequence from 0, or -1 for a gap
    indices_hit: tuple[int, ...]

    @property
    def letters(self) -> str:
        """Aligned part of the template without gaps."""
        return self.hit_sequence.replace("-", "")

    @property
    def pdb_chain(self) -> tuple[str, str] | None:
        """PDB id in lower case, and chain; None if the name does not begin with them."""
        match = _PDB_CHAIN.match(self.name)
        return None if match is None else (match[1].lower(), match[2])

    def mapping(self) -> dict[int, int]:
        """Map each aligned residue of the query to its place in :attr:`letters`."""
        first = min((place for place in self.indices_hit if place >= 0), default=0)
        pairs = zip(self.indices_query, self.indices_hit, strict=True)
        return {mine: theirs - first for mine, theirs in pairs if mine >= 0 and theirs >= 0}


def is_ranked(hits: Sequence[TemplateHit]) -> bool:
    """Return True for HHsearch's hits, which are ranked by ``sum_probs``."""
    return bool(hits) and hits[0].sum_probs is not None


Reason = (
    Literal["used", "not needed", "coverage", "duplicate", "short", "repeated", "name"]
    | Literal["withdrawn", "date", "late", "no date", "missing file", "unreadable", "no chains"]
    | Literal["not found", "other sequence", "no atoms", "broken"]
)
"""``used``, or the reason why not:

- there are enough templates already (``not needed``);
- the search shows that it covers too little of the query (``coverage``), is the query itself (``duplicate``), is too
  short (``short``), repeats a template (``repeated``), or has a name other than a PDB chain (``name``);
- the PDB has withdrawn it (``withdrawn``), or it is too new by the list of release dates (``date``) or by its file
  (``late``), or has no date there (``no date``);
- its file is missing (``missing file``), damaged (``unreadable``), or without a protein (``no chains``);
- the chain is missing in the file (``not found``), has another sequence there (``other sequence``), too few atoms
  (``no atoms``), or neighbours that are too far apart (``broken``).
"""


class TemplateSkipped(Exception):
    """Hit or structure that cannot be a template; caught where templates are chosen."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True)
class Outcome:
    """Outcome of one hit or structure."""

    name: str  #: ``<PDB id>_<chain>`` of a hit, or a file's name and chain
    reason: Reason  #: ``used``, or the short reason why not
    message: str = ""  #: Reason for users; empty if it is used without remarks
    index: int = 0  #: Number of the hit in its search, from 1; 0 for a user's structure
    aligned: int = 0  #: Number of aligned residues of the query

    @property
    def used(self) -> bool:
        """True if it is a template."""
        return self.reason == "used"


_START = re.compile(r"No +(\d{1,9})\s*$", re.ASCII)
_ROW = re.compile(r"\s*(\d{1,9}) +([A-Z-]+) +(\d{1,9}) +\((\d{1,9})\)\s*$", re.ASCII)
_NAME_WIDTH = 17  #: Columns before the numbers of a row: ``Q``, a blank, 14 letters of the name, a blank
_ANNOTATIONS = ("Consensus", "ss_dssp", "ss_pred", "ss_conf")


@dataclass
class _HitRows:
    """Rows of one sequence in a hit, joined over its blocks."""

    letters: str = ""
    indices: list[int] = field(default_factory=list)


def parse_hhr(text: str, query: str, *, path: PathLike | None = None) -> list[TemplateHit]:
    """Parse HHsearch's output to its hits, in the order of the file.

    Raises:
        InputError: The text is not such a file, is damaged or truncated, or belongs to another sequence.
    """
    lines = split_lines(text)
    if not any(line.startswith("Query ") for line in lines[:20]):
        raise InputError("expected HHsearch's output (with a line 'Query'); search again", path=path)
    starts = [i for i, line in enumerate(lines) if line.startswith("No ")]
    ends = [*starts[1:], len(lines)][: len(starts)]
    return [_parse_hit(lines, start, end, query, path) for start, end in zip(starts, ends, strict=True)]


def _parse_hit(lines: Sequence[str], start: int, end: int, query: str, path: PathLike | None) -> TemplateHit:
    def fail(message: str, line: int) -> InputError:
        return InputError(f"{message}; is the file truncated? Search again", path=path, line=line + 1)

    number = _START.match(lines[start])
    if number is None or end - start < 3 or not lines[start + 1].startswith(">"):
        raise fail("a hit without number, name and scores", start)
    aligned_cols, sum_probs = _scores(lines[start + 2])
    if aligned_cols is None or sum_probs is None:
        raise fail("the line of scores lacks Aligned_cols and Sum_probs", start + 2)
    rows = {"Q": _HitRows(), "T": _HitRows()}
    for at in range(start + 3, end):
        line = lines[at]
        if line[:2] not in ("Q ", "T ") or line[2:].startswith(_ANNOTATIONS):
            continue
        match = _ROW.match(line[_NAME_WIDTH:])
        if match is None:
            raise fail(f"not a row of an alignment: {line[:60]!r}", at)
        last = max(rows[line[0]].indices, default=-1)
        if last >= 0 and match[2].strip("-") and int(match[1]) != last + 2:
            raise fail("a row does not continue at the end of the previous one", at)
        rows[line[0]].letters += match[2]
        places = itertools.count(int(match[1]) - 1)
        rows[line[0]].indices += [-1 if letter == "-" else next(places) for letter in match[2]]
        if rows[line[0]].indices and int(match[3]) - int(match[1]) + 1 != sum(c != "-" for c in match[2]):
            raise fail("a row has more or fewer residues than its numbers say", at)
        if line[0] == "T" and len(rows["T"].letters) != len(rows["Q"].letters):
            raise fail("the rows of query and template differ in length", at)
    ours, theirs = rows["Q"], rows["T"]
    if not ours.letters or len(ours.letters) != len(theirs.letters):
        raise fail("a hit without an alignment", start)
    if not any(place >= 0 for place in theirs.indices):
        raise fail("a hit without a residue of the template", start)
    for letter, place in zip(ours.letters, ours.indices, strict=True):
        if place >= len(query) or (
            place >= 0 and "X" not in (letter, query[place]) and letter != query[place]
        ):
            raise InputError(
                f"the hits belong to another sequence, whose residue {place + 1} is {letter!r}; search with this "
                "sequence, or remove the file",
                path=path,
                line=start + 1,
            )
    return TemplateHit(
        index=int(number[1]),
        name=lines[start + 1][1:],
        aligned_cols=aligned_cols,
        sum_probs=sum_probs,
        query=ours.letters,
        hit_sequence=theirs.letters,
        indices_query=tuple(ours.indices),
        indices_hit=tuple(theirs.indices),
    )


def _scores(line: str) -> tuple[int | None, float | None]:
    """Return aligned columns and the sum of probabilities; None if missing or not a number."""
    values = dict(part.partition("=")[::2] for part in line.split())
    try:
        columns, total = plain_float(values["Aligned_cols"]), plain_float(values["Sum_probs"])
    except (KeyError, ValueError):
        return None, None
    if not (math.isfinite(columns) and math.isfinite(total)):
        return None, None
    return int(columns), total


_NAME = re.compile(r"([A-Za-z0-9]+)_(\w+)/(\d{1,9})-(\d{1,9})$", re.ASCII)
_ALIGNED = re.compile(r"[A-Za-z.-]+")


def parse_hmmsearch(text: str, query: str, *, path: PathLike | None = None) -> list[TemplateHit]:
    """Parse an alignment of hits, in the order of the rows.

    Other molecules than proteins are left out, but counted in ``index``.

    Raises:
        InputError: The text is not such an alignment, is truncated, or belongs to another sequence.
    """
    lines = split_lines(text)
    if not text.strip():
        return []
    if not lines[0].startswith("# STOCKHOLM"):
        raise InputError("expected an alignment of hmmsearch (with a line '# STOCKHOLM')", path=path, line=1)
    if not any(line.startswith("//") for line in lines):
        raise InputError("is truncated (no line '//'); search again", path=path)
    descriptions: dict[str, str] = {}
    rows: dict[str, list[str]] = {}
    where: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.startswith("//"):
            break
        words = line.split(None, 3 if line.startswith("#=GS") else 1)
        if line.startswith("#=GS") and len(words) > 2 and words[2] == "DE":
            descriptions[words[1]] = words[3] if len(words) > 3 else ""
        elif words and not line.startswith("#"):
            if len(words) != 2 or not _ALIGNED.fullmatch(words[1].rstrip()):
                raise InputError(f"not a row of an alignment: {line[:60]!r}", path=path, line=number)
            rows.setdefault(words[0], []).append(words[1].rstrip())
            where.setdefault(words[0], number)
    hits = []
    for index, (name, pieces) in enumerate(rows.items(), 1):
        row, line_number = "".join(pieces).replace(".", ""), where[name]
        if "mol:protein" in descriptions.get(name, ""):
            hits.append(_hit(index, name, row, query, path, line_number))
    return hits


def _hit(index: int, name: str, row: str, query: str, path: PathLike | None, line: int) -> TemplateHit:
    """Parse the hit of one row, whose columns of insertions are free of ``.``."""
    fail = partial(InputError, path=path, line=line, record=name)
    match = _NAME.match(name)
    if match is None:
        raise fail("expected a hit named <PDB id>_<chain>/<first>-<last>; search pdb_seqres.txt")
    columns = sum(letter == "-" or letter.isupper() for letter in row)
    if columns != len(query):
        raise fail(
            f"the hits belong to another sequence: its profile has {columns} columns, the query {len(query)} "
            "residues; search with this sequence, or remove the file"
        )
    # An insertion before the first aligned residue does not belong to the hit.
    aligned = next((i for i, letter in enumerate(row) if letter.isupper()), None)
    if aligned is None:
        raise fail("the row lacks an aligned residue")
    place = int(match[3]) - 1 + sum(letter.islower() for letter in row[:aligned])
    row = "-" * row[:aligned].count("-") + row[aligned:]
    indices = []
    for letter in row:
        if letter == "-":
            indices.append(-1)
            continue
        if letter.isupper():
            indices.append(place)
        place += 1
    return TemplateHit(
        index=index,
        name=f"{match[1]}_{match[2]}",
        aligned_cols=sum(letter.isupper() for letter in row),
        sum_probs=None,
        query=query,
        hit_sequence=row.upper(),
        indices_query=tuple(range(len(query))),
        indices_hit=tuple(indices),
    )
