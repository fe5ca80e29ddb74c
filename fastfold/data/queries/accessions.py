"""Sequences of UniProt accessions and AlphaFold DB ids, downloaded where the user allows it."""

from __future__ import annotations

import os
import re

from fastfold.errors import InputError, NetworkError
from fastfold.utils.download.answers import Retries, read_answer
from fastfold.utils.text_files import PathLike

UNIPROT = "https://rest.uniprot.org/uniprotkb"  #: Address of UniProt's entries
_MAX_ENTRY = 1 << 20  # bytes; the longest protein of UniProt has 45,000 residues
_MISSING = (400, 404, 410)
# The form of accessions by UniProt's help page, and ids of AlphaFold DB, whose fragment 1 has the whole of a protein.
_ACCESSION = "(?:[OPQ][0-9][A-Z0-9]{3}[0-9]|[A-NR-Z][0-9](?:[A-Z][A-Z0-9]{2}[0-9]){1,2})"
_ID = re.compile(rf"(?:AF-({_ACCESSION})-F1(?:-model_v[0-9]{{1,2}})?|({_ACCESSION}))")


def accessions_of(path: PathLike) -> list[str]:
    """Return the accessions of an input ``P69905``, ``AF-P69905-F1`` or ``P69905:P68871``; none of another input.

    A file of this name precedes.
    """
    ids = [_ID.fullmatch(part) for part in os.fspath(path).split(":")]
    if not all(ids) or os.path.exists(path):
        return []
    return [one[1] or one[2] for one in ids if one is not None]


def refuse_download(path: PathLike) -> InputError:
    """Return the error for accessions whose download is not allowed."""
    return InputError(
        "no file has this name, which is a UniProt accession; add `allow_download` to fetch its sequence from "
        f"{UNIPROT.split('/')[2]}, or give a FASTA file",
        path=path,
    )


def fetch_sequence(accession: str, retries: Retries | None = None) -> str:
    """Return the letters of an entry of UniProt, or raise InputError if there is none or it cannot be downloaded."""
    url = f"{UNIPROT}/{accession}.fasta"
    try:
        text = read_answer(url, limit=_MAX_ENTRY, timeout=30.0, retries=retries).decode("ascii", "replace")
    except NetworkError as error:
        if error.status in _MISSING:
            raise InputError("UniProt has no such entry; check the accession", record=accession) from error
        raise InputError(str(error), record=accession) from error
    header, *lines = text.split("\n")
    letters = "".join(line.strip() for line in lines)
    if not text:
        raise InputError("UniProt has no sequence of this entry any more; it was removed", record=accession)
    if not header.startswith(">") or re.fullmatch("[A-Z]+", letters) is None:
        raise InputError(f"{url}: expected one FASTA record, found {text[:40]!r}", record=accession)
    return letters
