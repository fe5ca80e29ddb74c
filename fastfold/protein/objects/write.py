"""Structures of FastFold as objects of Biotite, Biopython and MDAnalysis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastfold.errors import ConfigError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import named_protein
from fastfold.protein.protein import check_writable
from fastfold.utils.packages import require_package


@dataclass(frozen=True)
class _StructureAtoms:
    """Present atoms of a structure, ``A`` of ``N`` residues that have one.

    ``residues [A]`` is the place of each atom's residue among those with atoms. ``chains [N]`` is the index of each
    residue's chain in ``chain_ids``, and ``numbers [N]`` number and insertion code. Positions are ``[A, 3]`` float32 in
    Å.
    """

    residues: np.ndarray
    chains: np.ndarray
    chain_ids: tuple[str, ...]
    numbers: list[tuple[int, str]]
    residue_names: list[str]
    names: list[str]
    positions: np.ndarray
    b_factors: np.ndarray

    @property
    def elements(self) -> list[str]:
        return [name[0] for name in self.names]

    def labels(self) -> tuple[Any, ...]:
        """Return all that two models of one structure have in common."""
        return self.chain_ids, self.numbers, self.residue_names, self.names, self.residues.tolist()


def to_biotite(source: Any) -> Any:
    """Return a Biotite ``AtomArray`` with pLDDT or B-factors as ``b_factor``.

    Args:
        source: A :class:`fastfold.Prediction`, a :class:`Protein <fastfold.protein.protein.Protein>`, a
            :class:`~fastfold.protein.structure.Structure` or a file; a list of them for an ``AtomArrayStack``.

    Raises:
        ConfigError: Biotite is not installed, or the structures of a list have different atoms.
        InputError: A file is invalid.
        OutputError: There are no atoms, or a value is not finite.

    Example:
        >>> import fastfold
        >>> from fastfold.protein import to_biotite
        >>> atoms = to_biotite(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0))
        >>> atoms[atoms.atom_name == "CA"].coord.shape
        (10, 3)
    """
    require_package("biotite", "to_biotite")
    from biotite.structure import AtomArray, stack

    models = _models(source)
    arrays = []
    for atoms in models:
        array = AtomArray(len(atoms.names))
        array.coord = atoms.positions
        numbers = [atoms.numbers[i] for i in atoms.residues]
        array.chain_id = np.array(atoms.chain_ids)[atoms.chains[atoms.residues]]
        array.res_id = np.array([number for number, _ in numbers])
        array.ins_code = np.array([code for _, code in numbers])
        array.res_name = np.array(atoms.residue_names)[atoms.residues]
        array.atom_name = np.array(atoms.names)
        array.element = np.array(atoms.elements)
        array.set_annotation("b_factor", atoms.b_factors.astype(float))
        arrays.append(array)
    return stack(arrays) if isinstance(source, (list, tuple)) else arrays[0]


def to_biopython(source: Any, name: str = "") -> Any:
    """Return a ``Bio.PDB`` structure called ``name`` with pLDDT or B-factors as B-factors.

    Source and errors as of :func:`to_biotite`; a list becomes the models of the structure.

    Example:
        >>> import fastfold
        >>> from fastfold.protein import to_biopython
        >>> structure = to_biopython(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0), "query")
        >>> [residue.get_resname() for residue in structure[0]["A"]][:3]
        ['MET', 'THR', 'TYR']
    """
    from Bio.PDB.StructureBuilder import StructureBuilder

    builder = StructureBuilder()
    builder.init_structure(name)
    for model, atoms in enumerate(_models(source)):
        builder.init_model(model)
        builder.init_seg(" ")
        last_chain = last = -1
        for i, residue in enumerate(atoms.residues.tolist()):
            if residue != last:
                chain = int(atoms.chains[residue])
                if chain != last_chain:
                    builder.init_chain(atoms.chain_ids[chain])
                number, insertion = atoms.numbers[residue]
                builder.init_residue(atoms.residue_names[residue], " ", number, insertion or " ")
                last_chain, last = chain, residue
            atom, element = atoms.names[i], atoms.elements[i]
            b_factor = float(atoms.b_factors[i])
            builder.init_atom(atom, atoms.positions[i], b_factor, 1.0, " ", f" {atom:<3}", None, element)
    return builder.get_structure()


def to_mdanalysis(source: Any) -> Any:
    """Return an MDAnalysis ``Universe`` with pLDDT or B-factors as ``tempfactors``.

    Source and errors as of :func:`to_biotite`; a list becomes the frames of a trajectory.

    Example:
        >>> import fastfold
        >>> from fastfold.protein import to_mdanalysis
        >>> universe = to_mdanalysis(fastfold.predict("MTYKLILNGK", "mini", num_recycles=0))
        >>> universe.select_atoms("name CA").positions.shape
        (10, 3)
    """
    require_package("MDAnalysis", "to_mdanalysis")
    from MDAnalysis import Universe

    models = _models(source)
    atoms = models[0]
    universe = Universe.empty(
        len(atoms.names),
        n_residues=len(atoms.numbers),
        n_segments=len(atoms.chain_ids),
        atom_resindex=atoms.residues,
        residue_segindex=atoms.chains,
        trajectory=True,
    )
    chain_ids = [atoms.chain_ids[chain] for chain in atoms.chains[atoms.residues]]
    for attribute, values in (
        ("names", atoms.names),
        ("elements", atoms.elements),
        ("chainIDs", chain_ids),
        ("tempfactors", atoms.b_factors),
        ("occupancies", np.ones(len(atoms.names), np.float32)),
        ("record_types", ["ATOM"] * len(atoms.names)),
        ("resids", [number for number, _ in atoms.numbers]),
        ("icodes", [code for _, code in atoms.numbers]),
        ("resnames", atoms.residue_names),
        ("segids", list(atoms.chain_ids)),
    ):
        universe.add_TopologyAttr(attribute, values)
    universe.load_new(np.stack([model.positions for model in models]))
    return universe


def _models(source: Any) -> list[_StructureAtoms]:
    sources = list(source) if isinstance(source, (list, tuple)) else [source]
    if not sources:
        raise ConfigError("expected at least one structure, found an empty list")
    models = [_atoms(one) for one in sources]
    for number, model in enumerate(models[1:], 2):
        if model.labels() != models[0].labels():
            raise ConfigError(
                f"the structures of a list are models of one: number {number} has other atoms than the first; convert "
                "it alone"
            )
    return models


def _atoms(source: Any) -> _StructureAtoms:
    protein, names = named_protein(source)
    check_writable(protein)
    present = protein.atom_mask > 0.5
    kept = np.flatnonzero(present.any(-1))
    residues, slots = np.nonzero(present)
    return _StructureAtoms(
        residues=np.searchsorted(kept, residues),
        chains=protein.chain_index[kept],
        chain_ids=names.chain_ids,
        numbers=[names.split_number(i) for i in kept.tolist()],
        residue_names=[rc.resnames[kind] for kind in protein.aatype[kept].tolist()],
        names=[rc.atom_types[slot] for slot in slots.tolist()],
        positions=protein.atom_positions[present],
        b_factors=protein.b_factors[present],
    )
