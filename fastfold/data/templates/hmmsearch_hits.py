"""Parse hits of hmmsearch in the PDB's sequences, from its alignment (``-A``, Stockholm).

Rows are named ``<PDB id>_<chain>/<first>-<last>``; their ``#=GS … DE`` lines have the header of ``pdb_seqres.txt``
(``mol:protein length:108  …``). Match states, one for each residue of the query, are upper case or ``-``; insertions
are lower case or ``.`` (HMMER user guide).
"""

from __future__ import annotations

import re

from fastfold.data.templates.hits import TemplateHit
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, split_lines

_NAME = re.compile(r"([A-Za-z0-9]+)_(\w+)/(\d{1,9})-(\d{1,9})$", re.ASCII)
_ROW = re.compile(r"[A-Za-z.-]+")


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
            if len(words) != 2 or not _ROW.fullmatch(words[1].rstrip()):
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
    found = _NAME.match(name)
    if found is None:
        raise InputError(
            "expected a hit named <PDB id>_<chain>/<first>-<last>; search pdb_seqres.txt",
            path=path,
            line=line,
            record=name,
        )
    columns = sum(letter == "-" or letter.isupper() for letter in row)
    if columns != len(query):
        raise InputError(
            f"the hits belong to another sequence: its profile has {columns} columns, the query {len(query)} "
            "residues; search with this sequence, or remove the file",
            path=path,
            line=line,
            record=name,
        )
    if not any(letter.isupper() for letter in row):
        raise InputError("the row lacks an aligned residue", path=path, line=line, record=name)
    # An insertion before the first aligned residue does not belong to the hit.
    aligned = next(i for i, letter in enumerate(row) if letter.isupper())
    place = int(found[3]) - 1 + sum(letter.islower() for letter in row[:aligned])
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
        name=f"{found[1]}_{found[2]}",
        aligned_cols=sum(letter.isupper() for letter in row),
        sum_probs=None,
        query=query,
        hit_sequence=row.upper(),
        indices_query=tuple(range(len(query))),
        indices_hit=tuple(indices),
    )
