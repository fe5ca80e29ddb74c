"""Alignments of other programs in a folder of alignments, and files there that are not read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from fastfold.data.msa.formats import is_aligned_fasta, parse_aligned_fasta
from fastfold.data.msa.keyed import CHAI_ENDING, is_keyed_table, parse_keyed_table, read_chai_alignment
from fastfold.data.msa.msa import Msa
from fastfold.data.targets import Chain
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, read_text_bytes

_FASTA = (".fasta", ".fa")
_PACKED = ".gz"
OTHER_ENDINGS = (*(f"{end}{packed}" for end in (".csv", *_FASTA) for packed in ("", _PACKED)), CHAI_ENDING)
"""Endings of alignments of other programs; those but Chai's may be of other files, too."""

READABLE = (
    "an alignment is A3M (.a3m), Stockholm (.sto), a table of Boltz (.csv with the columns key and sequence), or FASTA "
    "with gaps and rows of equal length (.fasta)"
)


def is_other_alignment(path: Path, *, limit: int) -> bool:
    """Return True for a file of Chai, a table of Boltz, or FASTA whose records have equal lengths and gaps."""
    if path.name.endswith(CHAI_ENDING):
        return True
    try:
        text = read_text_bytes(path, limit=limit).decode("utf-8", "replace")
    except InputError:
        return False
    return (
        is_aligned_fasta(text) if path.name.removesuffix(_PACKED).endswith(_FASTA) else is_keyed_table(text)
    )


def parse_other_file(path: PathLike, *, limit: int) -> Msa:
    """Read an alignment by its ending, one of :data:`OTHER_ENDINGS`.

    Raises:
        InputError: The file cannot be read, or is not such an alignment.
    """
    name = os.fspath(path).lower().removesuffix(_PACKED)
    if name.endswith(CHAI_ENDING):
        return read_chai_alignment(path, limit=limit)
    text = read_text_bytes(path, limit=limit).decode("utf-8", "replace")
    return (parse_aligned_fasta if name.endswith(_FASTA) else parse_keyed_table)(text, path=path)


def chai_file(msa_dir: PathLike, chain: Chain) -> list[Path]:
    """Return Chai's file of a chain in a folder, named by the hash of its sequence; empty if there is none."""
    sequence = chain.letters or chain.sequence
    path = Path(msa_dir) / f"{hashlib.sha256(sequence.encode('ascii')).hexdigest()}{CHAI_ENDING}"
    return [path] if path.is_file() else []


def named_like(place: Path) -> list[Path]:
    """Return the files whose name is that of a path and any ending, sorted."""
    if not place.parent.is_dir():
        return []
    with os.scandir(place.parent) as entries:
        names = [one.name for one in entries if one.name.startswith(f"{place.name}.") and one.is_file()]
    return [place.parent / name for name in sorted(names)]
