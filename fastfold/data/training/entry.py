"""Chains and complexes to train on: their files, and their content."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from fastfold.data.msa.find import (
    AlignmentFile,
    ChainAlignments,
    find_alignments,
    find_hits,
    read_msa,
    sorted_alignments,
    sorted_hits,
)
from fastfold.data.msa.msa import Msa, check_query
from fastfold.data.targets import Chain
from fastfold.data.templates.hits import TemplateHit
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.structure import ChainStructure, Structure
from fastfold.utils.text_files import FileSlice, PathLike

EXPERIMENTAL, DISTILLATION = "experimental", "distillation"

_CA = rc.atom_order["CA"]
_MAX_RENAMED = 0.05


@dataclass(frozen=True)
class Entry:
    """Chain to train on."""

    id: str  #: Name in logs, and of its alignment
    structure: Path  #: File of its structure
    sequence: str  #: ``N`` letters
    chain_id: str | None = None  #: Name in the file; None for the only chain there
    alignment_dir: Path | None = None  #: Folder of its alignment, or None
    #: Name of the chain whose alignments it shares, or an empty string for its ``id``
    alignment_name: str = ""
    #: Its alignments and template hits in a database, which replace those in a folder
    alignment_files: tuple[FileSlice, ...] | None = None
    cluster: str = ""  #: Name of its sequence cluster, or an empty string
    cluster_size: int = 1  #: Number of chains in that cluster; 1 if unknown
    resolution: float | None = None  #: Resolution of the structure in Å, or None if unknown
    release_date: str = ""  #: ``YYYY-MM-DD``, or an empty string
    #: Share of residues with a CA position, or None if the file has not been read
    resolved: float | None = None
    msa_rows: int | None = None  #: Number of rows of its alignments from a table, or None
    weight: float = 1.0  #: Factor of its sampling probability
    source: str = EXPERIMENTAL  #: ``experimental`` or ``distillation`` (a predicted structure)
    #: Number of its record in a packed set (:mod:`fastfold.data.training.packed`), or None
    record: int | None = None

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def has_plddt(self) -> bool:
        """True if the structure's B-factors are pLDDT values, by which residues are masked."""
        return self.source == DISTILLATION

    def alignments(self) -> tuple[AlignmentFile, ...]:
        """Return its alignment files in the order of reading; empty for single-sequence mode.

        Raises:
            InputError: Its folder contains no alignment.
        """
        return tuple(_alignments(self, self, self.alignment_name or self.id).unpaired)

    def chain_alignments(self, chains: Sequence[ChainStructure]) -> dict[str, ChainAlignments]:
        """Return the alignment files of its chains by sequence; errors as of :meth:`alignments`."""
        return {chain.sequence: ChainAlignments(list(self.alignments())) for chain in chains}

    def template_hits(self, chains: Sequence[ChainStructure]) -> dict[str, AlignmentFile]:
        """Return the files of template hits next to the alignments, by sequence.

        Raises:
            InputError: The folder of alignments cannot be searched.
        """
        files = _hits(self, self, self.alignment_name or self.id)
        return {chain.sequence: files[0] for chain in chains if files}

    @property
    def has_template_hits(self) -> bool:
        """Return True if it has a file of template hits."""
        return bool(_hits(self, self, self.alignment_name or self.id))


def alignment_depth(entry: Entry) -> int:
    """Return the number of alignment rows of an entry, including the query; 0 without alignment.

    The rows are counted if no table has the number.

    Raises:
        InputError: An alignment is invalid.
    """
    if entry.msa_rows is not None:
        return entry.msa_rows
    return sum(len(read_msa(path).sequences) for path in entry.alignments())


def read_chain_msa(path: PathLike, sequence: str) -> Msa:
    """Read an alignment of a structure's chain.

    Programs write modified residues differently (as X, or as different parents), and treat a ligand at the chain's end
    differently. Therefore up to 5% of the first row's letters may differ, and X may follow the chain's end. The first
    row is then replaced by the chain.

    Raises:
        InputError: The file is invalid, or belongs to another chain.
    """
    msa = read_msa(path)
    length = len(sequence)
    first = msa.sequences[0]
    renamed = sum(a != b for a, b in zip(first, sequence, strict=False))
    if len(first) < length or set(first[length:]) - {"X"} or renamed > _MAX_RENAMED * length:
        check_query(msa, sequence, path=path)
    rows = (sequence, *(row[:length] for row in msa.sequences[1:]))
    return Msa(rows, msa.deletions[:, :length], msa.descriptions)


def mask_low_plddt(chain: ChainStructure, minimum: float) -> ChainStructure:
    """Remove all atoms of residues whose CA has a B-factor, the pLDDT, below a minimum.

    See the supplement, section 1.3, which has another confidence.

    Raises:
        InputError: No residue is left.
    """
    sure = chain.b_factors[:, _CA] >= minimum
    mask = chain.mask * sure[:, None]
    if not mask.any():
        raise InputError(
            f"no residue has a pLDDT of {minimum:g} or more; remove it from the distillation set"
        )
    return replace(chain, mask=mask, positions=chain.positions * mask[..., None])


def resolved_share(chain: ChainStructure) -> float:
    """Compute the share of residues whose CA has a position."""
    return float(chain.mask[:, _CA].mean())


def select_chain(structure: Structure, entry: Entry) -> ChainStructure:
    """Return the entry's chain; the only chain of a file is used even if its name differs."""
    for chain in structure.chains:
        if chain.chain_id == entry.chain_id:
            return chain
    if len(structure.chains) == 1:
        return structure.chains[0]
    names = ", ".join(chain.chain_id for chain in structure.chains)
    asked = "several chains and none is chosen" if entry.chain_id is None else f"no chain {entry.chain_id!r}"
    raise InputError(f"has {asked}; its chains are {names}", path=entry.structure, record=entry.id)


class ComplexMsas(NamedTuple):
    """Alignments of one chain, whose first rows are the chain."""

    unpaired: tuple[Msa, ...] = ()  #: Alignments without pairing
    #: Alignments whose rows are paired with those of a complex's other chains by species (UniProt)
    paired: tuple[Msa, ...] = ()


@dataclass(frozen=True)
class ComplexEntry(Entry):
    """All protein chains of a structure file; an :class:`Entry` with the concatenated sequence of its members."""

    #: Chains listed by the training set; other chains of the file also belong to the complex
    members: tuple[Entry, ...] = ()

    def chain_alignments(self, chains: Sequence[ChainStructure]) -> dict[str, ChainAlignments]:
        """Return the alignment files of its chains by sequence.

        Alignments of chain ``A`` of ``1abc.cif`` are looked up as ``1abc_A`` and in the other places of
        :mod:`fastfold.data.msa.find`, and under the training set's name of the chain. Chains with equal sequences share
        the alignments of the first that has any.
        """
        alignments: dict[str, ChainAlignments] = {}
        for chain, member in zip(chains, _members_of(self, chains), strict=True):
            if not alignments.get(chain.sequence):
                asked = _asked(chain.chain_id, chain.sequence, member)
                alignments[chain.sequence] = _alignments(self, member, _stem(self.structure), chain=asked)
        return alignments

    def template_hits(self, chains: Sequence[ChainStructure]) -> dict[str, AlignmentFile]:
        """Return template hits like :meth:`fastfold.data.training.entry.Entry.template_hits`.

        Chains with equal sequences share the hits of the first that has any.
        """
        hits: dict[str, AlignmentFile] = {}
        for chain, member in zip(chains, _members_of(self, chains), strict=True):
            if chain.sequence not in hits:
                asked = _asked(chain.chain_id, chain.sequence, member)
                files = _hits(self, member, _stem(self.structure), chain=asked)
                hits |= dict(zip([chain.sequence], files, strict=False))
        return hits

    @property
    def has_template_hits(self) -> bool:
        """Return True if a member has a file of template hits."""
        return any(
            _hits(self, one, _stem(self.structure), chain=_asked(one.chain_id or "", one.sequence, one))
            for one in self.members
        )


@dataclass(frozen=True, eq=False)
class EntryData:
    """Content of the files of a chain or a complex."""

    chains: tuple[ChainStructure, ...]  #: The chain, or all chains in the order of the file
    msas: tuple[ComplexMsas, ...]  #: Alignments of each chain; chains of equal sequence share theirs
    #: Resolution of the structure in Å, or None; from the entry, otherwise from the file
    resolution: float | None
    #: Release date of the structure, ``YYYY-MM-DD`` or an empty string; from the entry, otherwise from the file
    release_date: str = ""
    #: Template hits by sequence, if they were read together with the rest (a packed set), otherwise None
    hits: Mapping[str, Sequence[TemplateHit]] | None = None

    @property
    def chain(self) -> ChainStructure:
        """First chain, the only one of an entry that is not a complex."""
        return self.chains[0]

    @property
    def alignments(self) -> tuple[Msa, ...]:
        """Alignments of the first chain without pairing."""
        return self.msas[0].unpaired


def group_complexes(entries: Sequence[Entry]) -> tuple[ComplexEntry, ...]:
    """Group chains by structure file to complexes, sorted by name.

    A complex has the name of its file, or of its only chain. Its weight is the sum over its different sequences of
    ``min(1, copies / cluster_size)`` times the chain's own factor. Therefore the complexes of a cluster of chains
    together are drawn as often as a single chain without relatives. A ring of twelve equal chains is not drawn twelve
    times as often as a single chain.
    """
    files: dict[Path, list[Entry]] = {}
    for entry in entries:
        files.setdefault(entry.structure, []).append(entry)
    return tuple(sorted((_complex(members) for members in files.values()), key=lambda entry: entry.id))


def chains_of(entry: Entry) -> tuple[Entry, ...]:
    """Return the chains of a complex, or the entry of a single chain."""
    return entry.members if isinstance(entry, ComplexEntry) else (entry,)


def _complex(members: list[Entry]) -> ComplexEntry:
    first = members[0]
    copies = Counter(member.sequence for member in members)
    weights = {m.sequence: m.weight * min(1.0, copies[m.sequence] / m.cluster_size) for m in members}
    total = sum(len(member) for member in members)
    shares = [member.resolved for member in members]
    known = [share * len(m) for share, m in zip(shares, members, strict=True) if share is not None]
    values = {field.name: getattr(first, field.name) for field in fields(Entry)}
    values |= {
        "id": first.id if len(members) == 1 else _stem(first.structure),
        "sequence": "".join(member.sequence for member in members),
        "chain_id": None,
        "alignment_name": "",
        "alignment_files": None,
        "cluster": "",
        "cluster_size": 1,
        "resolved": sum(known) / total if len(known) == len(members) else None,
        "weight": sum(weights.values()),
    }
    return ComplexEntry(**values, members=tuple(members))


def read_entry(
    entry: Entry,
    *,
    structure_reader: Callable[[Path], Structure] = read_structure,
    msa_reader: Callable[[AlignmentFile, str], Msa] = read_chain_msa,
) -> EntryData:
    """Read the structure of a chain or a complex and the alignments of its chains.

    Raises:
        InputError: A file is invalid, the chain is missing in it, or an alignment belongs to another chain.
    """
    structure = structure_reader(entry.structure)
    chains = structure.chains if isinstance(entry, ComplexEntry) else (select_chain(structure, entry),)
    msas = {
        sequence: ComplexMsas(
            tuple(msa_reader(path, sequence) for path in files.unpaired),
            tuple(msa_reader(path, sequence) for path in files.paired),
        )
        for sequence, files in entry.chain_alignments(chains).items()
    }
    return EntryData(
        chains=chains,
        msas=tuple(msas[chain.sequence] for chain in chains),
        resolution=structure.resolution if entry.resolution is None else entry.resolution,
        release_date=entry.release_date or structure.release_date,
    )


def _members_of(entry: ComplexEntry, chains: Sequence[ChainStructure]) -> list[Entry | None]:
    listed: dict[str | None, Entry] = {member.chain_id: member for member in entry.members}
    if len(chains) == 1:
        listed.setdefault(chains[0].chain_id, entry.members[0])
    return [listed.get(chain.chain_id) for chain in chains]


def _asked(chain_id: str, sequence: str, member: Entry | None) -> Chain:
    """Return a chain with the names under which its alignments are looked up."""
    return Chain(chain_id, sequence, record=(member.alignment_name or member.id) if member else "")


def _alignments(
    entry: Entry, member: Entry | None, name: str, *, chain: Chain | None = None
) -> ChainAlignments:
    if member is not None and member.alignment_files is not None:
        return sorted_alignments(member.alignment_files)
    if entry.alignment_dir is None:
        return ChainAlignments()
    return find_alignments(entry.alignment_dir, name, chain=chain)


def _hits(
    entry: Entry, member: Entry | None, name: str, *, chain: Chain | None = None
) -> Sequence[AlignmentFile]:
    if member is not None and member.alignment_files is not None:
        return sorted_hits(member.alignment_files)
    return [] if entry.alignment_dir is None else find_hits(entry.alignment_dir, name, chain=chain)


def _stem(structure: Path) -> str:
    return os.path.splitext(structure.name.removesuffix(".gz"))[0]
