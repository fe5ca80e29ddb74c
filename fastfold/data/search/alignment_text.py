"""Format alignments of HMMER as Stockholm and A3M."""

from __future__ import annotations

import io
import itertools
import re

from pyhmmer.easel import DigitalMSA

_GAPS = re.compile(r"[-.]+")


def stockholm_text(msa: DigitalMSA) -> bytes:
    """Format an alignment as HMMER's programs do, the query first, with ``#=GC RF`` below each block."""
    buffer = io.BytesIO()
    msa.write(buffer, "stockholm")
    return buffer.getvalue()


def a3m_text(msa: DigitalMSA) -> bytes:
    """Format an alignment as A3M, with the first row's residues as columns and lower-case insertions."""
    text = msa.textize()
    rows = text.alignment
    descriptions = [sequence.description for sequence in text.sequences]
    match = [letter not in "-." for letter in rows[0]]
    # Runs of columns of one kind, at whose borders rows are split.
    borders = [0, *(i for i in range(1, len(match)) if match[i] != match[i - 1]), len(match)]
    stretches = [(start, end, match[start]) for start, end in itertools.pairwise(borders)]
    lines = []
    for name, description, row in zip(text.names, descriptions, rows, strict=True):
        pieces = [
            row[start:end].upper().replace(".", "-") if is_match else _GAPS.sub("", row[start:end]).lower()
            for start, end, is_match in stretches
        ]
        lines.append(f">{name} {description or ''}".rstrip() + "\n" + "".join(pieces) + "\n")
    return "".join(lines).encode()
