"""Value objects for experimental structures: what the readers of structure files return and training uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class ChainStructure:
    """One protein chain of an experimental structure, ``N`` residues of its sequence, resolved or not.

    Attributes:
        chain_id: The chain's name in the file (author's name in mmCIF).
        sequence: ``N`` one-letter residues, ``X`` for those that are none of the twenty; all residues of the
            polymer where the file lists them (SEQRES, ``entity_poly_seq``), else those with coordinates.
        positions: ``[N, 37, 3]`` float32 atom37 positions in Å, zero where the mask is.
        mask: ``[N, 37]`` float32, 1 where the atom was observed.
        residue_index: ``[N]`` int32, strictly increasing; a gap in it is a gap in the chain.
        b_factors: ``[N, 37]`` float32.
        author_numbers: ``N`` residue numbers with insertion codes as the file prints them (``52``, ``52A``), empty
            for residues that were not observed; empty altogether if the chain does not come from a file.
        residue_names: Residue names as the file prints them, empty where ``author_numbers`` are.
    """

    chain_id: str
    sequence: str
    positions: np.ndarray
    mask: np.ndarray
    residue_index: np.ndarray
    b_factors: np.ndarray
    author_numbers: tuple[str, ...] = ()
    residue_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of residues."""
        return len(self.sequence)


@dataclass(frozen=True, eq=False)
class Structure:
    """The protein chains of one structure file.

    Attributes:
        name: Name of the file without its endings.
        chains: The chains in the order of the file; at least one.
        resolution: The experiment's, in Å, or None where it is not stated (NMR, missing header).
        method: Experimental method in lower case (``x-ray diffraction``), or an empty string.
        release_date: ``YYYY-MM-DD``, or an empty string.
        warnings: What the reader had to decide, one sentence each.
    """

    name: str
    chains: tuple[ChainStructure, ...]
    resolution: float | None = None
    method: str = ""
    release_date: str = ""
    warnings: tuple[str, ...] = field(default=())
