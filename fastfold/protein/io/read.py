"""Read structure files: :func:`read_structure` reads the protein chains of a PDB or mmCIF file."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from typing import Final

from fastfold.errors import InputError
from fastfold.protein.io.chains import build_chain
from fastfold.protein.io.mmcif_reader import parse_mmcif
from fastfold.protein.io.pdb_reader import RECORD_NAMES, parse_pdb
from fastfold.protein.io.records import FileRecords
from fastfold.protein.structure import Structure
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

_log = logging.getLogger(__name__)
_LIMIT: Final = 1 << 30
_ENDINGS = re.compile(r"(\.(pdb|ent|cif|mmcif))?(\.gz)?$", re.IGNORECASE)
_FIRST_LINES = 1000


def read_structure(path: PathLike, *, chain_ids: Iterable[str] | None = None) -> Structure:
    """Read the protein chains of an experimental structure, a PDB or mmCIF file, plain or gzipped.

    The first model is read and, of alternate locations, each residue's conformer with the highest occupancy.
    Selenomethionine becomes methionine (SE as SD), other modified residues their parents (as stated in the file,
    otherwise by Biopython's table), residues of unknown type ``X`` with N, CA, C, O and CB. Atoms outside a residue's
    type, hydrogens, waters, ligands and nucleic acids are left out. Arginine's NH1 and NH2 are named by their distance
    to CD, as in AlphaFold.

    Unobserved residues of the sequence (SEQRES, ``_entity_poly_seq``) are masked, and ``residue_index`` is the position
    in that sequence, from 0. Without a sequence, see :func:`~fastfold.protein.io.chains.residue_index_from_numbers`.

    Args:
        path: Path of the file, whose format is detected from its content; only names with suffix ``.gz`` are unpacked.
        chain_ids: Chains to read, by the author's names; None for all.

    Returns:
        The structure, with its chains in the order of the file.

    Raises:
        InputError: The file is missing, unreadable, truncated, malformed, or in another format; or it lacks a protein
            or a requested chain.
    """
    text = read_text_bytes(path, limit=_LIMIT).decode("latin-1")
    records = _parse(text, path)
    wanted = None if chain_ids is None else {chain_ids} if isinstance(chain_ids, str) else set(chain_ids)
    if wanted is not None and not wanted:
        raise InputError(
            "expected at least one chain in chain_ids; name one, or leave it out for all", path=path
        )
    warnings = list(records.warnings)
    chains = []
    for chain_id, record in records.chains.items():
        notes: list[str] = []
        chain = build_chain(record, records.parents, notes)
        if chain is not None:
            chains.append(chain)
            if wanted is None or chain_id in wanted:
                warnings += notes
    if not chains:
        raise InputError(_no_protein(records), path=path)
    there = [chain.chain_id for chain in chains]
    if wanted is not None and (absent := sorted(wanted.difference(there))):
        raise InputError(
            f"lacks the protein chain {', '.join(map(repr, absent))}; its protein chains are "
            f"{', '.join(map(repr, there))}",
            path=path,
        )
    return Structure(
        name=structure_name(path),
        chains=tuple(chain for chain in chains if wanted is None or chain.chain_id in wanted),
        resolution=records.resolution,
        method=records.method,
        release_date=records.release_date,
        warnings=tuple(warnings),
    )


def read_user_structure(path: PathLike) -> Structure:
    """Read a structure and log the reader's warnings.

    Raises:
        InputError: See :func:`read_structure`.
    """
    structure = read_structure(path)
    for warning in structure.warnings:
        _log.warning("%s: %s", os.fspath(path), warning)
    return structure


def structure_name(path: PathLike) -> str:
    """Return the name of a structure file without its folder and suffixes (for example ``.pdb.gz``)."""
    return _ENDINGS.sub("", os.path.basename(os.fspath(path)))


def _parse(text: str, path: PathLike) -> FileRecords:
    """Parse a file in the format detected from its content."""
    if not text.strip():
        raise InputError("is empty; download or copy it again", path=path)
    if "\0" in text:
        raise InputError("is a binary file, not a structure; give a PDB or mmCIF file", path=path)
    lines = split_lines(text)
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    if first.lower().startswith("data_"):
        return parse_mmcif(lines, path=path)
    if any(line[:6].rstrip() in RECORD_NAMES for line in lines[:_FIRST_LINES]):
        return parse_pdb(lines, path=path)
    found = {">": "FASTA or an alignment", "<": "a web page or XML"}.get(first.lstrip()[:1], "something else")
    raise InputError(
        f"is not a PDB or mmCIF file (it looks like {found}); give the structure's file", path=path
    )


def _no_protein(records: FileRecords) -> str:
    """Explain a missing protein chain, with a remedy."""
    there = [chain for chain in records.chains.values() if chain.residues]
    if there:
        nucleic = any(residue.is_nucleotide for chain in there for residue in chain.residues.values())
        kind = "DNA or RNA" if nucleic else "ligands"
        return (
            f"contains no protein chain, only {kind} (chains {', '.join(repr(c.chain_id) for c in there[:10])}); "
            "give a structure with a protein"
        )
    if records.waters:
        return f"contains no protein chain, only {records.waters:,} atoms of water; give a structure with a protein"
    return "contains no atoms (ATOM records); is it truncated? Download or copy it again"
