"""Alignments whose rows name their partners in other chains: tables of Boltz (CSV) and Chai (Parquet).

Boltz' tables have the columns ``key`` and ``sequence``, with rows in A3M's form; rows of two chains with equal keys are
paired, and an empty key or -1 pairs none. Chai's files ``<SHA-256 of the sequence>.aligned.pqt`` have the columns
``sequence`` and ``pairing_key``, and others that are not used.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fastfold.data.msa.msa import ChainMsas, Msa, parse_rows
from fastfold.errors import InputError
from fastfold.utils.foreign_text import table_cells, table_delimiter, table_rows
from fastfold.utils.packages import is_installed, missing
from fastfold.utils.text_files import PathLike, read_file_bytes, split_lines

CHAI_ENDING = ".aligned.pqt"
_COLUMNS = ["key", "sequence"]
_NO_PARTNER = ("", "-1", "-1.0", "nan")
_GAP = "-"


def is_keyed_table(text: str) -> bool:
    """Return True if the first line of a text has Boltz' two columns."""
    first = next((line for line in split_lines(text) if line.strip()), "")
    cells = first.lstrip("\ufeff").split(table_delimiter(first))
    return sorted(cell.strip().strip('"').lower() for cell in cells) == _COLUMNS


def parse_keyed_table(text: str, *, path: PathLike | None = None) -> Msa:
    r"""Parse a table of Boltz, whose first row is the query.

    Raises:
        InputError: The columns are others, or the rows are not an alignment; with the line.

    Example:
        >>> from fastfold.data.msa.keyed import parse_keyed_table
        >>> msa = parse_keyed_table("key,sequence\n0,MTYK\n1,MSaYK\n-1,M-YK\n")
        >>> msa.sequences, msa.keys
        (('MTYK', 'MSYK', 'M-YK'), ('0', '1', ''))
    """
    place = "table" if path is None else path
    rows = table_rows(text.lstrip("\ufeff"), place, table_delimiter(text))
    header = [name.strip().lower() for name in rows[0][1]] if rows else []
    if sorted(header) != _COLUMNS:
        raise InputError(
            "expected the columns 'key' and 'sequence' of an alignment of Boltz in the first line",
            path=path,
            line=1,
        )
    records: list[tuple[int, str, str]] = []
    for line, cells in rows[1:]:
        row = table_cells(header, cells, path=place, line=line)
        if row["sequence"].strip():
            records.append((line, row["key"].strip(), row["sequence"]))
    return _keyed(records, path)


def _keyed(records: Sequence[tuple[int, str, str]], path: PathLike | None) -> Msa:
    """Return the alignment of rows with their lines and keys, or raise InputError with the line."""
    if not records:
        raise InputError("the alignment has no rows; remove the file to fold without one", path=path)
    msa = parse_rows(
        [(line, f"row {number}", row) for number, (line, _, row) in enumerate(records, 1)], path=path
    )
    keys = tuple("" if key.lower() in _NO_PARTNER else key for _, key, _ in records)
    return replace(msa, keys=keys if any(keys) else ())


def read_chai_alignment(path: PathLike, *, limit: int) -> Msa:
    """Read a file of Chai, whose first row is the query.

    Raises:
        InputError: The package pyarrow is not installed, or the file is not such an alignment.
    """
    if not is_installed("pyarrow"):
        raise InputError(
            f"is a Parquet file, which needs {missing('pyarrow')}; or give the A3M files that it was made of",
            path=path,
        )
    import pyarrow
    from pyarrow import parquet

    data = read_file_bytes(path, limit=limit)
    try:
        file = parquet.ParquetFile(io.BytesIO(data))
        groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
        if sum(group.total_byte_size for group in groups) > limit:
            raise InputError(f"unpacks to more than {limit:,} bytes, the most that is read", path=path)
        table = file.read(columns=["sequence", "pairing_key"])
        sequences, keys = (
            [str(value or "") for value in table.column(name).to_pylist()]
            for name in ("sequence", "pairing_key")
        )
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        text = (str(error).splitlines() or ["no reason"])[0][:200]
        raise InputError(
            f"expected Chai's columns 'sequence' and 'pairing_key' ({text}); make the file again", path=path
        ) from None
    rows = zip(range(1, len(sequences) + 1), keys, sequences, strict=True)
    return _keyed([row for row in rows if row[2].strip()], path)


def pair_by_keys(sequences: Sequence[str], alignments: Sequence[ChainMsas]) -> list[ChainMsas]:
    """Pair the rows of different chains that share a key, line by line, and make all alignments of that kind.

    A row's partners are the rows of its key in other chains; of several rows of a key in a chain, the first belongs to
    the first and so on. Rows without a partner stay the chain's own. Lines with more chains come first, then the order
    of the chains' rows decides. Nothing changes without a shared key, and without lines that are paired already. If
    there are such lines, chains without any get as many lines of gaps.

    Args:
        sequences: Sequence of each chain; equal ones are copies, which are not paired with each other.
        alignments: Alignments of each chain.
    """
    own: dict[str, ChainMsas] = {}
    for sequence, msas in zip(sequences, alignments, strict=True):
        own.setdefault(sequence, msas)
    if len(own) > 1:
        if lines := _lines(own):
            own = {sequence: _by_lines(sequence, msas, lines) for sequence, msas in own.items()}
        own = _completed(own)
    return [own[sequence] for sequence in sequences]


_Row = tuple[int, int]  # number of an alignment and of a row in it


def _lines(own: Mapping[str, ChainMsas]) -> list[dict[str, _Row]]:
    """Return the row of each chain in each line of partners."""
    lines: dict[tuple[str, int], dict[str, _Row]] = {}
    for sequence, (unpaired, _) in own.items():
        seen: dict[str, int] = {}
        for number, msa in enumerate(unpaired):
            for row, key in enumerate(msa.keys):
                if not key or row == 0:  # the queries are a line already
                    continue
                seen[key] = seen.get(key, 0) + 1
                lines.setdefault((key, seen[key]), {})[sequence] = (number, row)
    return sorted((line for line in lines.values() if len(line) > 1), key=len, reverse=True)


def _by_lines(sequence: str, msas: ChainMsas, lines: Sequence[Mapping[str, _Row]]) -> ChainMsas:
    """Return a chain's rows outside of the lines, and its part of each line below the query."""
    unpaired, paired = msas
    paired_rows = {line[sequence] for line in lines if sequence in line}
    paired_rows |= {
        (number, 0) for number, msa in enumerate(unpaired) if msa.keys
    }  # the query is the first line
    kept = [
        replace(
            msa.take([row for row in range(len(msa.sequences)) if (number, row) not in paired_rows]), keys=()
        )
        for number, msa in enumerate(unpaired)
    ]
    gaps = _gaps(sequence, 1)
    rows = [_row_of(unpaired, line[sequence]) if sequence in line else gaps for line in lines]
    together = _joined([_query(sequence, unpaired), *rows])
    return [msa for msa in kept if msa.sequences], [*paired, together]


def _completed(own: Mapping[str, ChainMsas]) -> dict[str, ChainMsas]:
    """Give every chain the number of lines of the others, and mark all alignments as paired by their numbers."""
    counts = [sum(len(msa.sequences) for msa in paired if msa.as_is) for _, paired in own.values()]
    if not any(counts):
        return dict(own)
    complete: dict[str, ChainMsas] = {}
    for sequence, (unpaired, paired) in own.items():
        if paired and all(msa.as_is for msa in unpaired):
            complete[sequence] = unpaired, paired
            continue
        lines = paired or [_joined([_query(sequence, unpaired), _gaps(sequence, max(counts) - 1)])]
        complete[sequence] = [replace(msa, as_is=True) for msa in unpaired], lines
    return complete


def _row_of(msas: Sequence[Msa], place: _Row) -> Msa:
    number, row = place
    return msas[number].take([row])


def _query(sequence: str, unpaired: Sequence[Msa]) -> Msa:
    """Return the query alone, in the letters of an alignment that begins with it."""
    if unpaired and not unpaired[0].as_is:
        return replace(unpaired[0].take([0]), keys=())
    return Msa((sequence,), np.zeros((1, len(sequence)), np.int32), ("query",))


def _gaps(sequence: str, count: int) -> Msa:
    return Msa((_GAP * len(sequence),) * count, np.zeros((count, len(sequence)), np.int32), ("",) * count)


def _joined(rows: Sequence[Msa]) -> Msa:
    """Return the rows of several alignments below each other, paired with other chains' by their numbers."""
    return Msa(
        tuple(row for msa in rows for row in msa.sequences),
        np.concatenate([np.asarray(msa.deletions) for msa in rows]),
        tuple(name for msa in rows for name in msa.descriptions),
        as_is=True,
    )
