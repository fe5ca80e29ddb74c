"""ColabFold's A3M files: split those of many queries, and join those of a complex's chains.

An MSA server and ``mmseqs result2msa`` write the alignments of several queries into one file, each ended by a NUL byte.
A complex gets one file in ColabFold's format (:func:`fastfold.data.msa.colabfold.parse_colabfold`): lengths and copies
of its different chains, then rows paired over all chains, then each chain's own rows with gaps for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastfold.data.msa.msa import a3m_records, check_query, parse_a3m
from fastfold.data.targets import mask_unknown
from fastfold.errors import InputError

FIRST_QUERY = 101  #: Name of the first query in ColabFold's numbering


def fasta_of(sequences: Sequence[str]) -> str:
    """Format queries as FASTA, named 101, 102 and so on."""
    return "".join(f">{FIRST_QUERY + i}\n{sequence}\n" for i, sequence in enumerate(sequences))


def split_queries(content: bytes, sequences: Sequence[str], *, origin: str) -> list[str]:
    """Split a file of several alignments into A3M texts; only the query's row if nothing was found.

    Args:
        content: A3M text with a NUL byte after each query's rows, the query first, named by its number.
        sequences: Queries in the order of their numbers, from 101 on.
        origin: Source of the content in errors.

    Raises:
        InputError: A block is not the alignment of one of these queries.
    """
    texts = [""] * len(sequences)
    for block in content.split(b"\0"):
        text = block.decode("ascii", "replace").replace("\ufffd", "?").strip("\r\n")
        if not text:
            continue
        name = text[1:].split("\n", 1)[0].split()
        number = int(name[0]) - FIRST_QUERY if name and name[0].isdigit() and len(name[0]) < 7 else -1
        if not text.startswith(">") or not 0 <= number < len(sequences):
            raise InputError(
                f"expected the alignment of a query, found one that begins {text[:40]!r}", path=origin
            )
        if texts[number]:
            raise InputError(f"two alignments of query {name[0]}", path=origin)
        check_query(parse_a3m(text, path=origin), mask_unknown(sequences[number]), path=origin)
        texts[number] = text + "\n"
    return [text or f">{FIRST_QUERY + i}\n{sequences[i]}\n" for i, text in enumerate(texts)]


def join_complex(
    sequences: Sequence[str], copies: Sequence[int], unpaired: Sequence[str], paired: Sequence[str] | None
) -> str:
    """Format the alignment of a complex as ColabFold does.

    Args:
        sequences: Its different chains.
        copies: How many of each there are.
        unpaired: A3M text of each chain; empty for paired rows alone.
        paired: A3M text of each chain whose rows belong together by their number; None for the query alone.

    Raises:
        InputError: The paired alignments have different numbers of rows.
    """
    lines = [",".join(str(len(s)) for s in sequences) + "\t" + ",".join(map(str, copies))]
    if paired is None:
        paired = [f">{FIRST_QUERY + i}\n{sequence}\n" for i, sequence in enumerate(sequences)]
    rows = [_rows(text) for text in paired]
    if len({len(of_chain) for of_chain in rows}) != 1:
        counts = ", ".join(str(len(of_chain)) for of_chain in rows)
        raise InputError(
            f"expected equal numbers of rows in the paired alignments of the chains, found {counts}"
        )
    for together in zip(*rows, strict=True):
        lines.append(">" + "\t".join(name for name, _ in together))
        lines.append("".join(letters for _, letters in together))
    before, after = 0, sum(map(len, sequences))
    for sequence, text in zip(sequences, unpaired, strict=True) if unpaired else ():
        after -= len(sequence)
        for name, letters in _rows(text):
            lines += [f">{name}", "-" * before + letters + "-" * after]
        before += len(sequence)
    return "#" + "\n".join(lines) + "\n"


def _rows(text: str) -> list[tuple[str, str]]:
    records, _ = a3m_records(text)
    return [(record.header, "".join(record.lines)) for record in records]
