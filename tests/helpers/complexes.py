"""Invented complexes of helices, in closed form, and copies of them whose chains are moved, reordered and cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein
from tests.helpers.results import helix_atoms

FIRST, SECOND = "MKTAYIAKQRQISFVKSHFSRQLEERLGLI", "DEVWAQLNRCFPGHTMKSEY"
"""Sequences of two different chains."""


def rotation(axis: Sequence[float], degrees: float) -> np.ndarray:
    """Return the rotation ``[3, 3]`` about an axis."""
    x, y, z = np.asarray(axis, np.float64) / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = np.radians(degrees)
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def helix_chain(sequence: str, place: Sequence[float] = (0, 0, 0), turn: np.ndarray | None = None) -> Protein:
    """Return a helix with its middle at a place in Å, turned about it."""
    aatype = rc.sequence_to_aatype(sequence)
    positions, mask = helix_atoms(aatype)
    centered = positions - positions[:, 1].mean(0)
    placed = centered @ (np.eye(3) if turn is None else turn).T + np.asarray(place)
    number = len(sequence)
    return Protein(placed, mask, aatype, np.arange(1, number + 1), np.zeros(number), 0 * mask)


def ring(sequence: str, copies: int, radius: float, height: float = 0.0) -> list[Protein]:
    """Return upright helices around an axis, at a radius and a height in Å."""
    turns = [rotation((0, 0, 1), 360.0 * number / copies) for number in range(copies)]
    return [
        helix_chain(sequence, turn @ np.array([radius, 0.0, height]), turn @ rotation((1, 0.4, 0), 20.0))
        for turn in turns
    ]


def joined(chains: Sequence[Protein]) -> Protein:
    """Join chains in their order, with positions to the three decimals of files."""
    arrays = {
        field.name: np.concatenate([getattr(chain, field.name) for chain in chains])
        for field in dataclasses.fields(Protein)
    }
    arrays["atom_positions"] = arrays["atom_positions"].round(3)
    return Protein(**arrays | {"chain_index": np.repeat(np.arange(len(chains)), list(map(len, chains)))})


def cut(protein: Protein, keep: np.ndarray | slice) -> Protein:
    """Return some residues of a structure, in any order of whole chains, with its chains numbered again."""
    arrays = {field.name: getattr(protein, field.name)[keep] for field in dataclasses.fields(protein)}
    starts = np.diff(arrays["chain_index"], prepend=arrays["chain_index"][:1]) != 0
    return Protein(**arrays | {"chain_index": np.cumsum(starts)})


def perturbed(chains: Sequence[Protein], scale: float) -> list[Protein]:
    """Move each chain and bend its residues, more for a larger scale, in another way for each chain."""
    moved = []
    for number, chain in enumerate(chains):
        phase = 1.7 * number + 0.3
        turn = rotation((np.cos(phase), np.sin(phase), 0.5), 6.0 * scale)
        shift = scale * np.array([np.sin(2 * phase), np.cos(3 * phase), np.sin(5 * phase)])
        at = np.arange(len(chain))[:, None, None]
        bend = 0.5 * scale * np.sin(0.7 * at + np.array([0.0, 2.0, 4.0]) + phase)
        center = chain.atom_positions[:, 1].mean(0)
        positions = (chain.atom_positions - center) @ turn.T + center + shift + bend
        moved.append(dataclasses.replace(chain, atom_positions=positions))
    return moved
