"""Value objects of one structure: ``Protein``, its atoms as plain arrays, and ``Hydrogens``, which atom37 lacks.

All readers and writers of structure files use it. Residues of one chain are contiguous and chains are numbered from 0
in the order of the arrays, so that a chain is a slice.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastfold.errors import OutputError
from fastfold.protein import residue_constants as rc

PDB_CHAIN_IDS = string.ascii_uppercase + string.ascii_lowercase + string.digits
"""The 62 one-letter chain names of PDB files."""


def chain_name(index: int) -> str:
    """Return the name of a chain: A-Z, a-z, 0-9, and then AA, AB, ..., A9, BA, ... (mmCIF only)."""
    name, number = "", index + 1
    while number:
        number, letter = divmod(number - 1, len(PDB_CHAIN_IDS))
        name = PDB_CHAIN_IDS[letter] + name
    return name


def check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a value that is not None has another shape; the message has its name."""
    if value is not None and np.shape(value) != shape:
        raise ValueError(f"{name} has shape {list(np.shape(value))}, expected {list(shape)}")


def convert_arrays(owner: Any, layout: Mapping[str, tuple[type, tuple[int, ...]]]) -> None:
    """Convert fields of a frozen dataclass to arrays of dtypes and shapes, or raise ValueError.

    Whole numbers stay equal; numbers of 64 bits may lose precision.
    """
    for field, (dtype, shape) in layout.items():
        values, name = np.asarray(getattr(owner, field)), f"{type(owner).__name__}.{field}"
        check_shape(name, values, shape)
        if values.dtype.kind not in "biuf":
            raise ValueError(f"{name} must be numbers, found {values.dtype}")
        with np.errstate(invalid="ignore"):  # NaN among whole numbers is refused below
            array: np.ndarray = values.astype(dtype, copy=False)
        if np.issubdtype(dtype, np.integer) and array is not values and (array != values).any():
            raise ValueError(f"{name} must be whole numbers of {array.itemsize * 8} bits")
        object.__setattr__(owner, field, array)


@dataclass(frozen=True, eq=False)
class Protein:
    """Atoms of a structure with ``N`` residues in the atom37 layout.

    Arrays are converted to the types below, without a copy if they have these types.

    Raises:
        ValueError: Shapes disagree, a residue type is outside 0-20, chains are not in one piece each, or a
            residue number occurs twice in a chain.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein import Protein
        >>> zeros = np.zeros((2, 37))
        >>> protein = Protein(np.zeros((2, 37, 3)), zeros + 1, [0, 7], [1, 2], [0, 0], zeros)
        >>> len(protein), protein.sequences
        (2, ('AG',))
    """

    atom_positions: np.ndarray  #: ``[N, 37, 3]`` float32, in Å; meaningless where ``atom_mask`` is 0
    atom_mask: np.ndarray  #: ``[N, 37]`` float32, 1 for present atoms. A residue may lack all atoms.
    aatype: np.ndarray  #: ``[N]`` int32, residue types 0-20
    residue_index: (
        np.ndarray
    )  #: ``[N]`` int32, residue numbers as printed (usually from 1), unique in a chain
    chain_index: np.ndarray  #: ``[N]`` int32: 0, ..., 0, 1, ..., 1, and so on, without a gap
    b_factors: np.ndarray  #: ``[N, 37]`` float32; in predictions each residue's pLDDT (0 to 100)

    def __post_init__(self) -> None:
        n = len(self.aatype)
        layout: dict[str, tuple[type, tuple[int, ...]]] = {
            "atom_positions": (np.float32, (n, rc.atom_type_num, 3)),
            "atom_mask": (np.float32, (n, rc.atom_type_num)),
            "aatype": (np.int32, (n,)),
            "residue_index": (np.int32, (n,)),
            "chain_index": (np.int32, (n,)),
            "b_factors": (np.float32, (n, rc.atom_type_num)),
        }
        convert_arrays(self, layout)
        if n == 0:
            raise ValueError("a Protein needs at least one residue")
        if self.aatype.min() < 0 or self.aatype.max() > rc.unk_restype_index:
            raise ValueError("Protein.aatype must be in 0..20")
        steps = np.diff(self.chain_index)
        if self.chain_index[0] != 0 or np.any((steps != 0) & (steps != 1)):
            raise ValueError("Protein.chain_index must count 0, ..., 0, 1, ..., 1, ... without a gap")
        if len(np.unique(np.stack([self.chain_index, self.residue_index]), axis=1).T) != n:
            raise ValueError("Protein.residue_index repeats a number within a chain")

    def __len__(self) -> int:
        return len(self.aatype)

    @property
    def chains(self) -> tuple[slice, ...]:
        """Residue range of each chain."""
        ends = [*(np.flatnonzero(np.diff(self.chain_index)) + 1).tolist(), len(self)]
        return tuple(slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))

    @property
    def sequences(self) -> tuple[str, ...]:
        """One-letter sequence of each chain, ``X`` for unknown residues."""
        return tuple(rc.aatype_to_sequence(self.aatype[chain]) for chain in self.chains)


def check_writable(protein: Protein) -> None:
    """Check that a structure has atoms and finite values, before it is written.

    Raises:
        OutputError: No residue has an atom, or a position or B-factor of a present atom is not finite.
    """
    present = protein.atom_mask > 0.5
    if not present.any():
        raise OutputError(
            "the structure has no atoms, because its sequence has only unknown residues (X); "
            "give a sequence with at least one of the twenty amino acids"
        )
    finite = np.isfinite(protein.atom_positions).all(-1) & np.isfinite(protein.b_factors)
    bad = np.argwhere(present & ~finite)
    if len(bad):
        residue, atom = bad[0]
        where = f"chain {chain_name(int(protein.chain_index[residue]))}"
        raise OutputError(
            f"{len(bad)} atoms without a finite position or B-factor, the first is {rc.atom_types[atom]} of "
            f"{rc.resnames[protein.aatype[residue]]} {protein.residue_index[residue]} in {where}: "
            "the prediction failed and is not written; try `precision=fp32` and check the weights"
        )


@dataclass(frozen=True, eq=False)
class Hydrogens:
    """Hydrogens of a :class:`~fastfold.protein.protein.Protein`, ``H`` of them, in the order of its residues.

    Raises:
        ValueError: Shapes disagree, or the residues are out of order.
    """

    #: ``[H]`` int32, index of each hydrogen's residue in the protein's arrays, not decreasing
    residues: np.ndarray
    names: tuple[str, ...]  #: ``H`` atom names of the PDB, such as ``HA`` or ``HG21``
    positions: np.ndarray  #: ``[H, 3]`` float32, in Å

    def __post_init__(self) -> None:
        residues, positions = np.asarray(self.residues, np.int32), np.asarray(self.positions, np.float32)
        names = tuple(self.names)
        if residues.shape != (len(names),) or positions.shape != (len(names), 3):
            raise ValueError(
                f"Hydrogens have {len(names)} names, residues {list(residues.shape)} and positions "
                f"{list(positions.shape)}"
            )
        if np.any(np.diff(residues) < 0):
            raise ValueError("Hydrogens.residues must not decrease")
        object.__setattr__(self, "residues", residues)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "positions", positions)

    def __len__(self) -> int:
        return len(self.names)
