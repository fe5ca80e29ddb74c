"""Chain to train on: its files, and their content."""

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
        if self.alignment_files is not None:
            return tuple(sorted_alignments(self.alignment_files).unpaired)
        if self.alignment_dir is None:
            return ()
        return tuple(find_alignments(self.alignment_dir, self.alignment_name or self.id).unpaired)

    def template_hits(self, chains: Sequence[ChainStructure]) -> dict[str, AlignmentFile]:
        """Return the files of template hits next to the alignments, by sequence.

        Raises:
            InputError: The folder of alignments cannot be searched.
        """
        files = self._hits()
        return {chain.sequence: files[0] for chain in chains if files}

    @property
    def has_template_hits(self) -> bool:
        """Return True if it has a file of template hits."""
        return bool(self._hits())

    def _hits(self) -> Sequence[AlignmentFile]:
        if self.alignment_files is not None:
            return sorted_hits(self.alignment_files)
        if self.alignment_dir is None:
            return []
        return find_hits(self.alignment_dir, self.alignment_name or self.id)


def alignment_depth(entry: Entry) -> int:
    """Return the number of alignment rows of an entry, including the query; 0 without alignment.

    The rows are counted if no table has the number.

    Raises:
        InputError: An alignment is invalid.
    """
    if entry.msa_rows is not None:
        return entry.msa_rows
    return sum(len(read_msa(path).sequences) for path in entry.alignments())


@dataclass(frozen=True, eq=False)
class EntryData:
    """Content of an entry's files."""

    chain: ChainStructure  #: Its structure
    alignments: tuple[Msa, ...]  #: Alignments whose first rows are the chain
    #: Resolution of the structure in Å, or None; from the entry, otherwise from the file
    resolution: float | None
    #: Release date of the structure, ``YYYY-MM-DD`` or an empty string; from the entry, otherwise from the file
    release_date: str = ""
    #: Template hits by sequence, if they were read together with the rest (a packed set), otherwise None
    hits: Mapping[str, Sequence[TemplateHit]] | None = None

    @property
    def chains(self) -> tuple[ChainStructure, ...]:
        """The chain in a tuple."""
        return (self.chain,)


def read_entry(entry: Entry) -> EntryData:
    """Read an entry's structure and alignments.

    Raises:
        InputError: A file is invalid, the chain is missing in it, or an alignment belongs to another chain.
    """
    structure = read_structure(entry.structure)
    chain = select_chain(structure, entry)
    alignments = tuple(read_chain_msa(path, chain.sequence) for path in entry.alignments())
    resolution = structure.resolution if entry.resolution is None else entry.resolution
    return EntryData(chain, alignments, resolution, entry.release_date or structure.release_date)


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
    """Remove the residues of a predicted structure with low confidence.

    Args:
        chain: Chain whose B-factors are pLDDT values from 0 to 100.
        minimum: Residues whose CA has a lower value lose all atoms (supplement, section 1.3, with another confidence).

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
