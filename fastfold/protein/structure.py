"""Value objects for experimental structures, returned by readers of structure files and used in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein


@dataclass(frozen=True, eq=False)
class ChainStructure:
    """One protein chain of an experimental structure, ``N`` residues of its sequence, resolved or not."""

    chain_id: str  #: The chain's name in the file (author's name in mmCIF)
    #: ``N`` one-letter residues, ``X`` for others than the twenty. All residues of the polymer if the file lists them
    #: (SEQRES, ``entity_poly_seq``), else those with coordinates.
    sequence: str
    positions: np.ndarray  #: ``[N, 37, 3]`` float32 atom37 positions in Å, zero for unobserved atoms
    mask: np.ndarray  #: ``[N, 37]`` float32, 1 for observed atoms
    residue_index: np.ndarray  #: ``[N]`` int32, strictly increasing; its gaps are gaps in the chain
    b_factors: np.ndarray  #: ``[N, 37]`` float32
    #: ``N`` residue numbers with insertion codes as in the file (``52``, ``52A``), empty texts for unobserved residues.
    #: An empty tuple if the chain is not from a file.
    author_numbers: tuple[str, ...] = ()
    residue_names: tuple[str, ...] = ()  #: Residue names as in the file, empty for unobserved residues
    has_sequence: bool = (
        False  #: True if the file lists the residues of the polymer (SEQRES, ``entity_poly_seq``)
    )

    def __len__(self) -> int:
        return len(self.sequence)


@dataclass(frozen=True, eq=False)
class Structure:
    """Protein chains of one structure file."""

    name: str  #: Name of the file without its suffixes
    chains: tuple[ChainStructure, ...]  #: The chains in the order of the file; at least one
    resolution: float | None = (
        None  #: Resolution of the experiment in Å, or None if not stated (NMR, missing header)
    )
    method: str = ""  #: Experimental method in lower case (``x-ray diffraction``), or an empty string
    release_date: str = ""  #: ``YYYY-MM-DD``, or an empty string
    warnings: tuple[str, ...] = ()  #: Decisions of the reader, one sentence each
    left_out: tuple[str, ...] = ()  #: Names of the file's residues that are in no chain, and ``water``


def structure_to_protein(structure: Structure) -> Protein:
    """Return all chains of an experimental structure; unresolved residues are without atoms."""
    chains = structure.chains
    return Protein(
        atom_positions=np.concatenate([chain.positions for chain in chains]),
        atom_mask=np.concatenate([chain.mask for chain in chains]),
        aatype=np.concatenate([rc.sequence_to_aatype(chain.sequence) for chain in chains]),
        residue_index=np.concatenate([chain.residue_index for chain in chains]),
        chain_index=np.repeat(np.arange(len(chains)), [len(chain) for chain in chains]),
        b_factors=np.concatenate([chain.b_factors for chain in chains]),
    )
