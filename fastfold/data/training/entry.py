"""One chain to train on: where its files are, and what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastfold.data.msa.find import (
    AlignmentFile,
    find_alignments,
    find_hits,
    read_msa,
    sorted_alignments,
    sorted_hits,
)
from fastfold.data.msa.msa import Msa, check_query
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
    """One chain to train on.

    Attributes:
        id: Its name in logs, and that of its alignment.
        structure: File of its structure.
        sequence: ``N`` letters.
        chain_id: Its name in the file; None for the only chain there.
        alignment_dir: Folder in which its alignment is looked up, or None.
        alignment_name: Name of the chain whose alignments are its own too, or an empty string if these bear its ``id``.
        alignment_files: Its alignments and template hits inside a database; they are not looked up then.
        cluster: Name of its sequence cluster, or an empty string.
        cluster_size: Chains in that cluster, 1 where clusters are not known.
        resolution: The structure's, in Å, or None where it is not known.
        release_date: ``YYYY-MM-DD``, or an empty string.
        resolved: Share of residues with a CA position, or None where the file has not been read.
        msa_rows: Rows of its alignments if a table says, or None.
        weight: Factor of its sampling probability.
        source: ``experimental`` or ``distillation`` (a predicted structure).
        record: Number of its record in a packed set (:mod:`fastfold.data.training.packed`), or None.
    """

    id: str
    structure: Path
    sequence: str
    chain_id: str | None = None
    alignment_dir: Path | None = None
    alignment_name: str = ""
    alignment_files: tuple[FileSlice, ...] | None = None
    cluster: str = ""
    cluster_size: int = 1
    resolution: float | None = None
    release_date: str = ""
    resolved: float | None = None
    msa_rows: int | None = None
    weight: float = 1.0
    source: str = EXPERIMENTAL
    record: int | None = None

    def __len__(self) -> int:
        """Number of residues."""
        return len(self.sequence)

    @property
    def has_plddt(self) -> bool:
        """Whether the B-factors of the structure are pLDDT values, by which residues are masked."""
        return self.source == DISTILLATION

    def alignments(self) -> tuple[AlignmentFile, ...]:
        """Its alignment files, in the order in which they are read; empty for single-sequence mode.

        Raises:
            InputError: There is a folder for it without an alignment in it.
        """
        if self.alignment_files is not None:
            return tuple(sorted_alignments(self.alignment_files).unpaired)
        if self.alignment_dir is None:
            return ()
        return tuple(find_alignments(self.alignment_dir, self.alignment_name or self.id).unpaired)

    def template_hits(self, chains: Sequence[ChainStructure]) -> dict[str, AlignmentFile]:
        """By sequence, the file with the hits of a search for templates that lies beside the alignments.

        Args:
            chains: The chains of the entry.

        Raises:
            InputError: The folder of alignments cannot be searched.
        """
        files = self._hits()
        return {chain.sequence: files[0] for chain in chains if files}

    @property
    def has_template_hits(self) -> bool:
        """Whether such a file is there."""
        return bool(self._hits())

    def _hits(self) -> Sequence[AlignmentFile]:
        if self.alignment_files is not None:
            return sorted_hits(self.alignment_files)
        if self.alignment_dir is None:
            return []
        return find_hits(self.alignment_dir, self.alignment_name or self.id)


def alignment_depth(entry: Entry) -> int:
    """Rows of an entry's alignments together, the query's included; 0 without one.

    They are counted where no table says.

    Raises:
        InputError: An alignment cannot be used.
    """
    if entry.msa_rows is not None:
        return entry.msa_rows
    return sum(len(read_msa(path).sequences) for path in entry.alignments())


@dataclass(frozen=True, eq=False)
class EntryData:
    """What the files of an entry hold.

    Attributes:
        chain: Its structure.
        alignments: Their first rows are the chain.
        resolution: The structure's, in Å, or None: what the entry says, else what the file says.
        release_date: The structure's, ``YYYY-MM-DD`` or an empty string, in the same way.
        hits: Template hits by sequence where they were read together with the rest (a packed set), else None.
    """

    chain: ChainStructure
    alignments: tuple[Msa, ...]
    resolution: float | None
    release_date: str = ""
    hits: Mapping[str, Sequence[TemplateHit]] | None = None

    @property
    def chains(self) -> tuple[ChainStructure, ...]:
        """The chain, as the only one."""
        return (self.chain,)


def read_entry(entry: Entry) -> EntryData:
    """Reads an entry's structure and alignments.

    Raises:
        InputError: A file cannot be used, the chain is not in it, or an alignment is of another chain.
    """
    structure = read_structure(entry.structure)
    chain = select_chain(structure, entry)
    alignments = tuple(read_chain_msa(path, chain.sequence) for path in entry.alignments())
    resolution = structure.resolution if entry.resolution is None else entry.resolution
    return EntryData(chain, alignments, resolution, entry.release_date or structure.release_date)


def read_chain_msa(path: PathLike, sequence: str) -> Msa:
    """Reads an alignment that was made for a chain of a structure.

    Programs differ in how they write modified residues (as X, or as one parent or another) and in whether a
    ligand at the chain's end is one. So an alignment counts as that of the chain even if up to 5% of the first
    row's letters differ, or if X follow where the chain has ended; the first row then becomes the chain.

    Args:
        path: The file.
        sequence: The chain's, ``N`` letters.

    Raises:
        InputError: The file cannot be used, or is an alignment of another chain.
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
    """The chain without the residues of a predicted structure that the prediction was not sure of.

    Args:
        chain: Its B-factors are pLDDT values from 0 to 100.
        minimum: Residues whose CA has a lower one lose all their atoms (supplement, section 1.3, where the
            confidence is another one).

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
    """Share of residues whose CA has a position."""
    return float(chain.mask[:, _CA].mean())


def select_chain(structure: Structure, entry: Entry) -> ChainStructure:
    """The entry's chain; the only one of a file is meant even if it has been given another name there."""
    for chain in structure.chains:
        if chain.chain_id == entry.chain_id:
            return chain
    if len(structure.chains) == 1:
        return structure.chains[0]
    names = ", ".join(chain.chain_id for chain in structure.chains)
    asked = "several chains and none is chosen" if entry.chain_id is None else f"no chain {entry.chain_id!r}"
    raise InputError(f"has {asked}; its chains are {names}", path=entry.structure, record=entry.id)
