"""Read structures: :func:`read_structure` reads the protein chains of a file or of an object of another library."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.chains import build_chain
from fastfold.protein.io.mmcif_reader import parse_mmcif
from fastfold.protein.io.pdb_reader import RECORD_NAMES, parse_pdb
from fastfold.protein.io.records import WATERS, FileRecords
from fastfold.protein.labels import AuthorNames, author_names, default_names
from fastfold.protein.objects.records import library_of, object_name, object_records
from fastfold.protein.protein import Protein
from fastfold.protein.structure import ChainStructure, Structure, structure_to_protein
from fastfold.utils.option_fields import check_kind
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

_log = logging.getLogger(__name__)
_LIMIT: Final = 1 << 30
_ENDINGS = re.compile(r"(\.(pdb|ent|cif|mmcif))?(\.gz)?$", re.IGNORECASE)
_FIRST_LINES = 1000


def read_structure(source: Any, *, chain_ids: Iterable[str] | None = None) -> Structure:
    """Read the protein chains of an experimental structure, from a PDB or mmCIF file or an object of another library.

    The first model is read and, of alternate locations, each residue's conformer with the highest occupancy.
    Selenomethionine becomes methionine (SE as SD), other modified residues their parents (as stated in the file,
    otherwise by Biopython's table), residues of unknown type ``X`` with N, CA, C, O and CB. Atoms outside a residue's
    type, hydrogens, waters, ligands and nucleic acids are left out. Arginine's NH1 and NH2 are named by their distance
    to CD, as in AlphaFold.

    Unobserved residues of the sequence (SEQRES, ``_entity_poly_seq``) are masked, and ``residue_index`` is the position
    in that sequence, from 0. Without a sequence, see :func:`~fastfold.protein.io.chains.residue_index_from_numbers`.

    Args:
        source: Path of the file, plain or gzipped, whose format is detected from its content; only names with suffix
            ``.gz`` are unpacked. Or an object of :func:`~fastfold.protein.objects.records.object_records`, a
            :class:`Structure <fastfold.protein.structure.Structure>`, a
            :class:`Protein <fastfold.protein.protein.Protein>`, or an object with one as ``protein``.
        chain_ids: Chains to read, by the author's names; None for all.

    Raises:
        ConfigError: ``source`` is of another type.
        InputError: The file is missing, unreadable, truncated, malformed, or in another format; or it lacks a protein
            or a requested chain.

    Example:
        >>> import fastfold
        >>> from pathlib import Path
        >>> from fastfold.protein import read_structure
        >>> _ = Path("query.pdb").write_text(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).to_pdb())
        >>> structure = read_structure("query.pdb")
        >>> [(chain.chain_id, chain.sequence) for chain in structure.chains]
        [('A', 'MTYKLILNGK')]
    """
    if chain_ids is not None:
        check_kind("chain_ids", chain_ids, Iterable, "names of chains")
    wanted = None if chain_ids is None else {chain_ids} if isinstance(chain_ids, str) else set(chain_ids)
    path = _place(source)
    if wanted is not None and not wanted:
        raise InputError(
            "expected at least one chain in chain_ids; name one, or leave it out for all", path=path
        )
    structure, notes = _read(source)
    there = [chain.chain_id for chain in structure.chains]
    if wanted is None:
        wanted = set(there)
    if absent := sorted(wanted.difference(there)):
        raise InputError(
            f"lacks the protein chain {', '.join(map(repr, absent))}; its protein chains are "
            f"{', '.join(map(repr, there))}",
            path=path,
        )
    kept = tuple(chain for chain in structure.chains if chain.chain_id in wanted)
    more = (note for chain_id in there if chain_id in wanted for note in notes.get(chain_id, ()))
    return replace(structure, chains=kept, warnings=(*structure.warnings, *more))


def _read(source: Any) -> tuple[Structure, dict[str, list[str]]]:
    """Return all protein chains of a structure, and warnings about each by its name."""
    own = getattr(source, "protein", source)
    if isinstance(own, Structure):
        return own, {}
    if isinstance(own, Protein):
        return _of_protein(own, structure_name(source), _names_of(source, own)), {}
    if _is_object(source):
        records = object_records(source)
    else:
        records = _parse(read_text_bytes(source, limit=_LIMIT).decode("latin-1"), source)
    notes: dict[str, list[str]] = {}
    chains = []
    for chain_id, record in records.chains.items():
        about: list[str] = []
        chain = build_chain(record, records.parents, about)
        if chain is not None:
            chains.append(chain)
            notes[chain_id] = about
    if not chains:
        raise InputError(_no_protein(records), path=_place(source))
    structure = Structure(
        name=structure_name(source),
        chains=tuple(chains),
        resolution=records.resolution,
        method=records.method,
        release_date=records.release_date,
        warnings=tuple(records.warnings),
        left_out=_left_out(records, chains),
    )
    return structure, notes


def _left_out(records: FileRecords, chains: Sequence[ChainStructure]) -> tuple[str, ...]:
    """Return the names of residues that are in no chain, in their order; all waters have one name."""
    read = {chain.chain_id for chain in chains}
    names = set(records.hetero)
    for chain_id, record in records.chains.items():
        if chain_id not in read:
            names.update(name for residue in record.residues.values() for name in residue.names)
    names.difference_update(WATERS, *(chain.residue_names for chain in chains))
    return (*sorted(names), *(["water"] if records.waters else []))


def _names_of(source: Any, protein: Protein) -> AuthorNames:
    """Return the names that an object with a protein has for it, or default ones."""
    names = getattr(source, "author_names", None)
    return names if isinstance(names, AuthorNames) else default_names(protein)


def _of_protein(protein: Protein, name: str, names: AuthorNames) -> Structure:
    chains = tuple(
        ChainStructure(
            chain_id=names.chain_ids[number],
            sequence=sequence,
            positions=protein.atom_positions[chain] * protein.atom_mask[chain, :, None],
            mask=protein.atom_mask[chain],
            residue_index=protein.residue_index[chain],
            b_factors=protein.b_factors[chain],
            author_numbers=names.numbers[chain],
            residue_names=tuple(rc.resnames[kind] for kind in protein.aatype[chain]),
            has_sequence=True,
        )
        for number, (chain, sequence) in enumerate(zip(protein.chains, protein.sequences, strict=True))
    )
    return Structure(name=name, chains=chains)


def log_warnings(warnings: Iterable[str], source: Any) -> None:
    """Log warnings about a structure with its path, or the name of an object."""
    for warning in warnings:
        _log.warning("%s: %s", os.fspath(_place(source)), warning)


def as_protein(source: Any) -> Protein:
    """Return the atoms of a structure; source and errors as of :func:`read_structure`."""
    return named_protein(source)[0]


def named_protein(source: Any) -> tuple[Protein, AuthorNames]:
    """Return the atoms of a structure, and the names of its chains and residues; see :func:`as_protein`."""
    own = getattr(source, "protein", source)
    if isinstance(own, Protein):
        return own, _names_of(source, own)
    structure = read_structure(source)
    protein = structure_to_protein(structure)
    is_from_file = all(chain.author_numbers for chain in structure.chains)
    return protein, author_names(structure) if is_from_file else default_names(protein)


def structure_name(source: Any) -> str:
    """Return the name of a structure: that of its file without folder and suffixes (``.pdb.gz``), or of its object."""
    if not _is_object(source):
        return _ENDINGS.sub("", os.path.basename(os.fspath(source)))
    own = getattr(source, "name", None)
    return own if isinstance(own, str) and library_of(source) is None else object_name(source)


def read_objects(sources: Iterable[Any]) -> tuple[Path | Structure, ...]:
    """Read the structures of a list that are objects, each with a name of its own; paths stay paths.

    Sources and errors as of :func:`read_structure`.
    """
    structures: list[Path | Structure] = []
    names: set[str] = set()
    for source in sources:
        if not _is_object(source):
            structures.append(Path(source))
            continue
        structure = read_structure(source)
        numbered = (f"{structure.name}_{number}" for number in count(2))
        name = next(name for name in (structure.name, *islice(numbered, len(names))) if name not in names)
        names.add(name)
        structures.append(replace(structure, name=name))
    return tuple(structures)


def is_structure(source: Any) -> bool:
    """Return True if :func:`read_structure` reads an argument: a path, or an object with a structure."""
    own = getattr(source, "protein", source)
    is_object = isinstance(own, (Structure, Protein)) or library_of(source) is not None
    return is_object or not _is_object(source)


def _place(source: Any) -> PathLike:
    """Return the path of a structure in messages, or the name of an object."""
    return structure_name(source) if _is_object(source) else source


def _is_object(source: Any) -> bool:
    return not isinstance(source, (str, os.PathLike))


def _parse(text: str, path: PathLike) -> FileRecords:
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
    kind = {">": "FASTA or an alignment", "<": "a web page or XML"}.get(first.lstrip()[:1], "something else")
    raise InputError(
        f"is not a PDB or mmCIF file (it looks like {kind}); give the structure's file", path=path
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
