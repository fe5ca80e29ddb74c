"""From the records of a structure file to its protein chains."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from fastfold.data.chain_structure import ChainStructure
from fastfold.data.structure_conformers import Conformer, bonded, choose_conformer
from fastfold.data.structure_records import NUCLEOTIDES, ChainRecord
from fastfold.protein import residue_constants as rc

_LARGEST_STEP = 20_000
"""More than any two PDB residue numbers differ by; keeps the sum of wild jumps within 32 bits."""


def build_chain(
    record: ChainRecord, parents: Mapping[str, str], warnings: list[str]
) -> ChainStructure | None:
    """Decides on residues, sequence and numbering of one chain.

    Args:
        record: The chain as the file has it.
        parents: The file's own statements on modified residues.
        warnings: Takes a sentence for each thing that had to be decided.

    Returns:
        The chain, or None if it is no protein or has no atoms of one.
    """
    if record.protein is False:
        return None
    residues = [r for r in (choose_conformer(r, parents) for r in record.residues.values()) if r is not None]
    residues = _without_ligands(residues)
    nucleotides = sum(r.names[0] in NUCLEOTIDES for r in record.residues.values())
    if record.protein is None and nucleotides >= len(residues):
        return None
    if not residues:
        return None
    sequence = "".join(residue.letter for residue in residues)
    places = range(len(residues))
    chain = _pack(record.chain_id, sequence, residues, places, residue_index_from_numbers(residues))
    if not chain.mask[:, [rc.atom_order["N"], rc.atom_order["C"]]].any():
        warnings.append(
            f"Chain {record.chain_id!r} has no backbone beyond its CA atoms; it cannot be used for training."
        )
    return chain


def _without_ligands(residues: list[Conformer]) -> list[Conformer]:
    """Drops HETATM residues of unknown name that no peptide bond joins to a neighbour."""
    kept = []
    for i, residue in enumerate(residues):
        if residue.record.hetero and not residue.known and residue.record.position is None:
            before = i > 0 and bonded(residues[i - 1], residue)
            after = i + 1 < len(residues) and bonded(residue, residues[i + 1])
            if not (before or after):
                continue
        kept.append(residue)
    return kept


def residue_index_from_numbers(residues: Sequence[Conformer]) -> np.ndarray:
    """Strictly increasing indices ``[N]`` int32 where nothing but the residue numbers is known.

    It starts at the first residue's number and follows the numbers, except that residues joined by a peptide
    bond are neighbours whatever their numbers, and that a number which does not grow (insertion codes,
    numbering that starts anew) counts one further, which shifts all that follow.
    """
    index = [residues[0].record.number]
    for before, after in itertools.pairwise(residues):
        step = after.record.number - before.record.number
        if step != 1 and bonded(before, after):
            step = 1
        index.append(index[-1] + min(max(step, 1), _LARGEST_STEP))
    return np.array(index, np.int32)


def _pack(
    chain_id: str,
    sequence: str,
    residues: Sequence[Conformer],
    places: Sequence[int],
    residue_index: np.ndarray,
) -> ChainStructure:
    """Arrays of a chain; ``places`` are the residues' positions in the sequence."""
    rows: list[int] = []
    slots: list[int] = []
    values: list[tuple[float, float, float, float]] = []
    for place, residue in zip(places, residues, strict=True):
        for slot, atom in residue.atoms.items():
            rows.append(place)
            slots.append(slot)
            values.append((atom.x, atom.y, atom.z, atom.b_factor))
    packed = np.zeros((len(sequence), rc.atom_type_num, 4), np.float32)
    mask = np.zeros((len(sequence), rc.atom_type_num), np.float32)
    packed[rows, slots] = values
    mask[rows, slots] = 1.0
    return ChainStructure(
        chain_id=chain_id,
        sequence=sequence,
        positions=np.ascontiguousarray(packed[..., :3]),
        mask=mask,
        residue_index=residue_index,
        b_factors=np.ascontiguousarray(packed[..., 3]),
    )
