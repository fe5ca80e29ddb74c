"""``Hydrogens``: hydrogens of a structure, which the atom37 layout does not include."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Hydrogens:
    """Hydrogens of a :class:`~fastfold.protein.protein.Protein`, ``H`` of them, in the order of its residues.

    Attributes:
        residues: ``[H]`` int32, index of each hydrogen's residue in the protein's arrays, not decreasing.
        names: ``H`` atom names of the PDB, such as ``HA`` or ``HG21``.
        positions: ``[H, 3]`` float32, in Å.

    Raises:
        ValueError: Shapes disagree, or the residues are out of order.
    """

    residues: np.ndarray
    names: tuple[str, ...]
    positions: np.ndarray

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
        """Return the number of hydrogens."""
        return len(self.names)
