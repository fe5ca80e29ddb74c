"""Alignments that inputs of other programs name: as text, files or folders, per chain.

AlphaFold 3 and Protenix have A3M in ``unpairedMsa`` and ``pairedMsa``, or their files in ``unpairedMsaPath`` and
``pairedMsaPath``, plain or packed by gzip or xz. An empty text means none, and a missing field or null leaves it
open. Rows of ``pairedMsa`` are paired by species. Protenix uses its own for the chain alone, too.

Boltz has ``msa``: a file, or ``empty``. Protenix' older inputs have the folder of ``pairing.a3m`` and
``non_pairing.a3m`` there. OpenFold 3 has files or folders, and paired files whose rows belong together by number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastfold.data.msa.find import (
    MAX_ALIGNMENT_BYTES,
    ChainAlignments,
    alignments_of_folder,
    read_alignments,
    read_hits,
    sorted_alignments,
)
from fastfold.data.msa.msa import ChainMsas, Msa, check_query, parse_a3m
from fastfold.data.queries.jobs import QueryJob
from fastfold.utils.text_files import read_packed_text

ALIGNMENT_FIELDS = ("msa", "unpairedMsa", "pairedMsa", "unpairedMsaPath", "pairedMsaPath")
_PAIRING, _NOT_PAIRING = "pairing.a3m", "non_pairing.a3m"


def entity_alignments(
    job: QueryJob, content: Mapping[str, Any], sequence: str, number: int, *, is_protenix: bool
) -> ChainMsas | None:
    """Read the alignments of a protein of AlphaFold 3, Protenix or Boltz; None if the input leaves them open.

    ``number`` is that of its entry, from 1.

    Raises:
        InputError: A file is missing, is not an alignment of the sequence, or a field contradicts another.
    """
    kinds = [_text_or_file(job, content, kind, sequence, number) for kind in ("unpairedMsa", "pairedMsa")]
    named = content.get("msa")
    if named in (None, "", {}):
        if kinds == [None, None]:
            return None
        own, paired = ([] if one is None else one for one in kinds)
        return ([*paired, *own] if is_protenix else own), paired
    if kinds != [None, None]:
        raise job.fail(f"entry {number} names alignments in 'msa' and in other fields; keep one of them")
    if named == "empty":
        return [], []
    field = f"entry {number}, 'msa'"
    if isinstance(named, Mapping):
        return _protenix_folder(job, named, sequence, field)
    path = job.find(named, field)
    with job.reading(field):
        return [read_hits(path, query=sequence)], []


def _text_or_file(
    job: QueryJob, content: Mapping[str, Any], kind: str, sequence: str, number: int
) -> list[Msa] | None:
    """Read A3M from a text or a file; empty for an empty text, None without both."""
    text, place = content.get(kind), content.get(f"{kind}Path")
    field = f"entry {number}, {kind!r}"
    if text and place:
        raise job.fail(f"{field} and '{kind}Path' exclude each other; keep one of them")
    if place:
        field = f"entry {number}, '{kind}Path'"
        path = job.find(place, field)
        with job.reading(field):
            msa = parse_a3m(read_packed_text(path, limit=MAX_ALIGNMENT_BYTES), path=path)
            check_query(msa, sequence, path=path)
            return [msa]
    if text is None:
        return None
    if not isinstance(text, str):
        raise job.fail(f"{field}: expected the text of an A3M alignment, found {str(text)[:40]!r}")
    if not text.strip():
        return []
    if not text.lstrip().startswith((">", "#")):
        raise job.fail(f"{field}: expected the text of an A3M alignment; name a file by '{kind}Path'")
    with job.reading(field):
        msa = parse_a3m(text)
        check_query(msa, sequence)
    return [msa]


def _protenix_folder(job: QueryJob, named: Mapping[str, Any], sequence: str, field: str) -> ChainMsas | None:
    place = named.get("precomputed_msa_dir")
    if not place:
        return None
    field = f"{field}, 'precomputed_msa_dir'"
    folder = job.find(place, field)
    files = [folder / name for name in (_PAIRING, _NOT_PAIRING) if (folder / name).is_file()]
    if not files:
        raise job.fail(f"{field}: {os.fspath(folder)!r} has neither {_PAIRING} nor {_NOT_PAIRING}")
    with job.reading(field):
        return read_alignments(sequence, sorted_alignments(files))


def openfold3_alignments(
    job: QueryJob, content: Mapping[str, Any], sequence: str, number: int, *, uses: Mapping[str, bool]
) -> ChainMsas | None:
    """Read the alignments of a chain of OpenFold 3; None if the input names none.

    ``uses`` tells which of ``main`` and ``paired`` alignments the query uses. Rows of paired files belong to those of
    other chains by their number. Without paired files, ``uniprot_hits`` among the main ones are paired by species.

    Raises:
        InputError: A file is missing, of another format, or not an alignment of the sequence.
    """
    fields = {"main": "main_msa_file_paths", "paired": "paired_msa_file_paths"}
    if not any(uses.values()):
        return [], []
    named = {kind: content.get(field) for kind, field in fields.items()}
    if not any(named.values()):
        return None
    files: dict[str, ChainAlignments] = {}
    for kind, field in fields.items():
        place = f"entry {number}, {field!r}"
        files[kind] = _openfold3_files(job, named[kind] if uses[kind] else None, place)
    with job.reading(f"entry {number}, {fields['main']!r}"):
        own, by_species = read_alignments(sequence, files["main"])
    with job.reading(f"entry {number}, {fields['paired']!r}"):
        lines, more = read_alignments(sequence, files["paired"])
    together = [replace(msa, as_is=True) for msa in (*lines, *more)]
    if not together:
        return own, by_species if uses["paired"] else []
    return [replace(msa, as_is=True) for msa in own], together


def _openfold3_files(job: QueryJob, named: object, field: str) -> ChainAlignments:
    """Return the alignment files of a field: a file, a folder, or a list of these."""
    places: Sequence[object] = named if isinstance(named, list) else [named] if named else []
    files: list[Path] = []
    for place in places:
        path = job.find(place, field)
        if path.is_dir():
            inside = alignments_of_folder(path)
            if not inside:
                raise job.fail(f"{field}: {os.fspath(path)!r} contains no alignment (.a3m or .sto)")
            files += [file for file in (*inside.unpaired, *inside.paired) if isinstance(file, Path)]
        elif path.suffix.lower() == ".npz":
            raise job.fail(
                f"{field}: {os.fspath(path)!r} holds arrays; name the .a3m or .sto files that it was made of"
            )
        elif not path.name.lower().removesuffix(".gz").endswith((".a3m", ".sto")):
            raise job.fail(f"{field}: expected .a3m or .sto (or .gz after it), found {os.fspath(path)!r}")
        else:
            files.append(path)
    return sorted_alignments(files)
