"""Parse HHsearch's output (``.hhr``): a table, then a paragraph for each hit.

A paragraph begins with ``No <number>``, the hit's name after ``>``, and a line of scores. Blocks of the alignment
follow, whose rows start with the first residue of template or query, counted from 1 (HH-suite user guide, "Output
alignment format")::

    Q query             1 KELRC-QCIK   10 (70)
    T 4XDX_A            1 KELRCAQCIK   11 (70)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastfold.data.templates.hits import TemplateHit
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, split_lines

_START = re.compile(r"No +(\d{1,9})\s*$", re.ASCII)
_ROW = re.compile(r"\s*(\d{1,9}) +([A-Z-]+) +(\d{1,9}) +\((\d{1,9})\)\s*$", re.ASCII)
_NAME_WIDTH = 17  #: Columns before the numbers of a row: ``Q``, a blank, 14 letters of the name, a blank
_ANNOTATIONS = ("Consensus", "ss_dssp", "ss_pred", "ss_conf")


@dataclass
class _Rows:
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
    rows = {"Q": _Rows(), "T": _Rows()}
    for at in range(start + 3, end):
        line = lines[at]
        if line[:2] not in ("Q ", "T ") or line[2:].startswith(_ANNOTATIONS):
            continue
        found = _ROW.match(line[_NAME_WIDTH:])
        if found is None:
            raise fail(f"not a row of an alignment: {line[:60]!r}", at)
        last = max(rows[line[0]].indices, default=-1)
        if last >= 0 and found[2].strip("-") and int(found[1]) != last + 2:
            raise fail("a row does not continue at the end of the previous one", at)
        _add_block(rows[line[0]], int(found[1]) - 1, found[2])
        if rows[line[0]].indices and int(found[3]) - int(found[1]) + 1 != sum(c != "-" for c in found[2]):
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


def _add_block(row: _Rows, first: int, letters: str) -> None:
    """Append one block's letters, whose first residue has this place."""
    row.letters += letters
    place = first
    for letter in letters:
        row.indices.append(-1 if letter == "-" else place)
        place += letter != "-"


def _scores(line: str) -> tuple[int | None, float | None]:
    """Return aligned columns and the sum of probabilities; None if missing or not a number."""
    values = dict(part.partition("=")[::2] for part in line.split())
    try:
        columns, total = float(values["Aligned_cols"]), float(values["Sum_probs"])
    except (KeyError, ValueError):
        return None, None
    if not (math.isfinite(columns) and math.isfinite(total)):
        return None, None
    return int(columns), total
