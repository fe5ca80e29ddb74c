"""Prepare a structure for OpenMM: split chains at gaps, and add missing heavy atoms and hydrogens."""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import openmm
from openmm import app, unit
from pdbfixer import PDBFixer

from fastfold.errors import InputError
from fastfold.inference.relax.caps import acetyl, methylamide
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.atom_rows import residue_b_factors
from fastfold.protein.labels import AuthorNames, residue_label
from fastfold.protein.protein import Hydrogens, Protein, check_writable
from fastfold.protein.side_chains.placement import place_side_chains

_OXT = rc.atom_order["OXT"]
_BACKBONE = [rc.atom_order[name] for name in ("N", "CA", "C")]
_SOME_FILE = "ATOM      1  N   GLY A   1       0.000   0.000   0.000  1.00  0.00           N\n"
"""Dummy file for pdbfixer; its topology and positions are replaced, which allows any number of chains."""
_LEAST_DISTANCE = 0.1
"""Distance in Å at which pdbfixer would consider atoms equal; bonded atoms are ten times as far apart."""
_SAME_PLACE = 0.0005
"""Distance in Å below which atoms are equal in a file, and pdbfixer's minimisation does not end."""
_OF_CAP = -1  #: In place of the residue's index for atoms of caps
_MIN_ATOMS = 3  #: Smallest number of atoms that determines position and orientation of a residue


@dataclass(frozen=True)
class PreparedStructure:
    """Structure with all of its ``A`` atoms."""

    topology: Any  #: OpenMM's topology, with the protein's residues that have atoms, in order
    positions: np.ndarray  #: ``[A, 3]`` float64, in Å
    residue_of: np.ndarray  #: ``[A]`` index of each atom's residue in the protein's arrays, -1 in caps
    is_hydrogen: np.ndarray  #: ``[A]`` bool
    atoms_added: int  #: Number of added heavy atoms
    #: Indices in the protein's arrays of cysteines with bonded sulphurs
    disulfides: tuple[tuple[int, int], ...]


def segments(protein: Protein) -> list[list[int]]:
    """Return runs of bonded residues with atoms, as indices in the protein's arrays.

    A run ends with its chain, where residue numbers are not consecutive, and at a terminal oxygen (OXT).
    """
    present = protein.atom_mask > 0.5
    rows = np.flatnonzero(present.any(-1))
    is_joined = (np.diff(protein.chain_index[rows]) == 0) & (np.diff(protein.residue_index[rows]) == 1)
    is_joined &= ~present[rows[:-1], _OXT]
    return [run.tolist() for run in np.split(rows, np.flatnonzero(~is_joined) + 1) if len(run)]


def alone(protein: Protein) -> list[int]:
    """Return the residues that are not bonded to another one, as indices in the protein's arrays."""
    return [run[0] for run in segments(protein) if len(run) == 1]


def check_relaxable(protein: Protein, names: AuthorNames | None = None) -> None:
    """Refuse structures without parameters in the force field, with the names of residues.

    An InputError names a residue of unknown type, with too few atoms, or alone without a backbone; an OutputError tells
    of no finite atoms.
    """
    check_writable(protein)
    count = (protein.atom_mask > 0.5).sum(-1)
    for i in np.flatnonzero(count).tolist():
        if protein.aatype[i] == rc.unk_restype_index:
            raise InputError(
                f"{residue_label(protein, i, names)} is of unknown type and has atoms, for which Amber99sb has no "
                "parameters; remove it from the file or give it one of the twenty types"
            )
    for i in alone(protein):
        if not (protein.atom_mask[i, _BACKBONE] > 0.5).all():
            raise InputError(
                f"{residue_label(protein, i, names)} is not bonded to another residue and lacks N, CA or C, without "
                "which it cannot be capped; remove it from the file, or give a complete residue"
            )
    for i in np.flatnonzero((count > 0) & (count < _MIN_ATOMS)).tolist():
        raise InputError(
            f"{residue_label(protein, i, names)} has {count[i]} of its heavy atoms, too few to place the others "
            f"({_MIN_ATOMS} are needed); remove it from the file, or give a complete structure"
        )


def prepare(
    protein: Protein, names: AuthorNames | None = None, *, rebuild: Collection[int] = ()
) -> PreparedStructure:
    """Add missing heavy atoms and hydrogens (pH 7), reproducibly.

    Runs of residues (:func:`segments`) become chains with charged ends; a residue alone gets caps
    (:mod:`~fastfold.inference.relax.caps`), since the force field has no parameters for it. pdbfixer adds terminal
    oxygens, the atoms of residues without N, CA or C, and hydrogens;
    :func:`~fastfold.protein.side_chains.placement.place_side_chains` adds all other heavy atoms, decides on disulfide
    bonds, and places the side chains of residues in ``rebuild`` again. Coordinates are first rounded to the 0.001 Å of
    structure files. Hydrogens are placed in double precision on the Reference platform. Errors are those of
    :func:`check_relaxable`, and ValueError where atoms coincide or cannot be completed.
    """
    check_relaxable(protein, names)
    protein = replace(protein, atom_positions=np.round(protein.atom_positions, 3))
    _check_apart(protein, names)
    present = int((protein.atom_mask > 0.5).sum())
    placed = place_side_chains(
        protein.atom_positions,
        protein.atom_mask,
        protein.aatype,
        chain_index=protein.chain_index,
        residue_index=protein.residue_index,
        rebuild=np.isin(np.arange(len(protein)), list(rebuild)),
    )
    disulfides = tuple(bond.residues for bond in placed.disulfides)
    whole = replace(protein, atom_positions=placed.positions, atom_mask=placed.mask)
    topology, heavy, residues = _topology(whole)
    reference = openmm.Platform.getPlatformByName("Reference")
    fixer = PDBFixer(pdbfile=io.StringIO(_SOME_FILE), platform=reference)
    fixer.topology, fixer.positions, fixer.sequences = topology, heavy * unit.angstrom, []
    fixer.missingResidues = {}
    fixer.findMissingAtoms()
    state = random.getstate()
    random.seed(0)  # OpenMM places hydrogens by Python's generator
    try:
        fixer.addMissingAtoms(seed=1)
        fixer.topology, fixer.positions = _with_disulfides(fixer, residues, disulfides)
        fixer.addMissingHydrogens(pH=7.0)
    finally:
        random.setstate(state)
    atoms = list(fixer.topology.atoms())
    positions = np.array(fixer.positions.value_in_unit(unit.angstrom), np.float64)
    if not np.isfinite(positions).all():
        raise ValueError("hydrogens or missing atoms could not be placed")
    is_hydrogen = np.array([atom.element is app.element.hydrogen for atom in atoms])
    residue_of = np.array([residues[atom.residue.index] for atom in atoms])
    return PreparedStructure(
        topology=fixer.topology,
        positions=positions,
        residue_of=residue_of,
        is_hydrogen=is_hydrogen,
        atoms_added=int((~is_hydrogen & (residue_of >= 0)).sum()) - present,
        disulfides=disulfides,
    )


def _check_apart(protein: Protein, names: AuthorNames | None) -> None:
    residues, slots = np.nonzero(protein.atom_mask > 0.5)
    xyz = protein.atom_positions[residues, slots].astype(np.float64)
    order = np.argsort(xyz[:, 0], kind="stable")
    residues, xyz = residues[order], xyz[order]
    for step in range(1, len(xyz)):
        along_x = xyz[step:, 0] - xyz[:-step, 0]
        if along_x.min() >= _LEAST_DISTANCE:
            return
        distance = np.linalg.norm(xyz[step:] - xyz[:-step], axis=-1)
        least = np.where(residues[step:] == residues[:-step], _LEAST_DISTANCE, _SAME_PLACE)
        near = np.flatnonzero(distance < least)
        if len(near):
            pair = {int(residues[near[0]]), int(residues[near[0] + step])}
            where = " and ".join(residue_label(protein, residue, names) for residue in sorted(pair))
            raise ValueError(f"atoms of {where} have the same position")


def _topology(protein: Protein) -> tuple[Any, np.ndarray, list[int]]:
    """Return OpenMM's topology of the heavy atoms, their positions in Å, and their residues' indices; -1 for caps."""
    topology = app.Topology()
    positions: list[np.ndarray] = []
    residues: list[int] = []
    is_present = protein.atom_mask > 0.5

    def add(chain: Any, name: str, index: int, atoms: Mapping[str, np.ndarray]) -> None:
        residue = topology.addResidue(name, chain, str(len(residues)))
        residues.append(index)
        for atom, position in atoms.items():
            topology.addAtom(atom, app.Element.getBySymbol(atom[0]), residue)
            positions.append(position)

    for number, run in enumerate(segments(protein)):
        chain = topology.addChain(str(number))
        xyz = protein.atom_positions[run[0]].astype(np.float64)
        if len(run) == 1:
            is_other = is_present & (np.arange(len(protein)) != run[0])[:, None]
            cap = acetyl(xyz, protein.atom_positions[is_other])
            add(chain, cap.residue, _OF_CAP, cap.atoms)
        for i in run:
            slots = np.flatnonzero(is_present[i]).tolist()
            atoms = {rc.atom_types[slot]: protein.atom_positions[i, slot] for slot in slots}
            add(chain, rc.resnames[protein.aatype[i]], i, atoms)
        if len(run) == 1 and not is_present[run[0], _OXT]:
            cap = methylamide(xyz)
            add(chain, cap.residue, _OF_CAP, cap.atoms)
    rounded = np.round(np.array(positions, np.float64), 3)
    topology.createStandardBonds()
    return topology, rounded, residues


def _with_disulfides(
    fixer: PDBFixer, residues: list[int], disulfides: tuple[tuple[int, int], ...]
) -> tuple[Any, Any]:
    """Return topology and positions with these disulfide bonds in place of pdbfixer's, which go by distance alone."""
    by_distance = [bond for bond in fixer.topology.bonds() if all(atom.name == "SG" for atom in bond)]
    modeller = app.Modeller(fixer.topology, fixer.positions)
    modeller.delete(by_distance)
    sulphurs = {residues[atom.residue.index]: atom for atom in modeller.topology.atoms() if atom.name == "SG"}
    for i, j in disulfides:
        modeller.topology.addBond(sulphurs[i], sulphurs[j])
    return modeller.topology, modeller.positions


def to_protein(
    prepared: PreparedStructure, positions: np.ndarray, like: Protein
) -> tuple[Protein, Hydrogens]:
    """Convert the structure with atoms at ``positions [A, 3]`` in Å back to heavy atoms and hydrogens.

    Terminal oxygens added at gaps and caps are removed. All but the atoms is that of ``like``, the original protein.
    """
    chains = [chain for chain in like.chains if (like.atom_mask[chain] > 0.5).any()]
    last = {chain.start + int(np.flatnonzero(like.atom_mask[chain].any(-1))[-1]) for chain in chains}
    b_factors = residue_b_factors(like)
    xyz, mask, b = np.zeros_like(like.atom_positions), np.zeros_like(like.atom_mask), like.b_factors.copy()
    names: list[str] = []
    rows: list[int] = []
    places = zip(prepared.topology.atoms(), prepared.residue_of.tolist(), strict=True)
    for row, (atom, i) in enumerate(places):
        if i == _OF_CAP:
            continue
        if prepared.is_hydrogen[row]:
            names.append(atom.name)
            rows.append(row)
            continue
        slot = rc.atom_order[atom.name]
        if slot == _OXT and like.atom_mask[i, slot] < 0.5 and i not in last:
            continue
        xyz[i, slot], mask[i, slot] = positions[row], 1.0
        if like.atom_mask[i, slot] < 0.5:
            b[i, slot] = b_factors[i]
    protein = replace(like, atom_positions=xyz, atom_mask=mask, b_factors=b * mask)
    hydrogens = Hydrogens(prepared.residue_of[rows], tuple(names), positions[rows].reshape(-1, 3))
    return protein, hydrogens
