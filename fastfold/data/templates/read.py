"""Files of hits, told by their names."""

from __future__ import annotations

import os

from fastfold.data.templates.hhr import parse_hhr
from fastfold.data.templates.hits import TemplateHit
from fastfold.data.templates.hmmsearch_hits import parse_hmmsearch
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, read_text_bytes

MAX_HITS_BYTES = 1 << 30


def read_hits(path: PathLike, query: str) -> list[TemplateHit]:
    """Reads the hits of a search.

    Args:
        path: HHsearch's output (``.hhr``) or an alignment that hmmsearch wrote (``.sto``), plain or with ``.gz``.
        query: The sequence that was searched with.

    Returns:
        The hits in the order of the file, only those of proteins.

    Raises:
        InputError: The file cannot be read, is damaged, or comes from a search with another sequence.
    """
    name = os.fspath(path).lower().removesuffix(".gz")
    if not name.endswith((".hhr", ".sto")):
        raise InputError(
            "the name of a file of template hits must end in .hhr or .sto (or .gz after it)", path=path
        )
    text = read_text_bytes(path, limit=MAX_HITS_BYTES).decode("utf-8", "replace")
    return (parse_hhr if name.endswith(".hhr") else parse_hmmsearch)(text, query, path=path)
