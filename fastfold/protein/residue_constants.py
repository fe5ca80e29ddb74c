"""Constants of the twenty amino acids: atoms, ideal geometry, and index tables.

The numbers are in ``residue_constants.json`` and ``stereochemistry.json`` next to this file; this module
converts them to arrays at import. Indices follow AlphaFold: residue types 0-19 in the order
``ARNDCQEGHILKMFPSTWYV``, 20 is unknown, 21 (alignments only) is a gap, 22 a masked position. Atom layouts
are ``atom37`` (one slot per atom name) and ``atom14`` (the atoms of a residue, densely packed). Every residue
is built from eight rigid groups: backbone, pre-omega, phi, psi, chi1 to chi4 (AlphaFold supplement, Table 2).
Lengths are in angstrom.
"""

from __future__ import annotations

import string
from typing import Any

import numpy as np

from fastfold.utils.foreign_text import package_json

_DATA = package_json("fastfold.protein", "residue_constants.json")
_RESIDUES = _DATA["residues"]

atom_types: tuple[str, ...] = tuple(_DATA["atom_types"])
atom_order: dict[str, int] = {name: i for i, name in enumerate(atom_types)}
atom_type_num = len(atom_types)  # 37

restypes: tuple[str, ...] = tuple(r["letter"] for r in _RESIDUES)
restype_order: dict[str, int] = {letter: i for i, letter in enumerate(restypes)}
restype_num = len(restypes)  # 20
unk_restype_index = restype_num
gap_index = restype_num + 1
restypes_with_x = (*restypes, "X")
restype_1to3: dict[str, str] = {r["letter"]: r["name"] for r in _RESIDUES} | {"X": "UNK"}
restype_3to1: dict[str, str] = {r["name"]: r["letter"] for r in _RESIDUES}
resnames: tuple[str, ...] = (*(r["name"] for r in _RESIDUES), "UNK")

hhblits_letter_to_id: dict[str, int] = _DATA["hhblits_letter_to_id"]
"""Letter of an alignment to HHblits residue id (alphabetical by letter; 20 unknown, 21 gap)."""
hhblits_id_to_restype = np.array(_DATA["hhblits_id_to_restype"], np.int32)
"""HHblits residue id ``[22]`` to the residue type order used everywhere else."""

element_radius: dict[str, float] = _DATA["element_radius"]  #: Van der Waals radius by element, in angstrom
ca_ca_distance: float = _DATA["ca_ca_distance"]

_PEPTIDE = _DATA["peptide_bond"]
between_res_bond_length_c_n = tuple(_PEPTIDE["c_n_length"][k][0] for k in ("other", "proline"))
between_res_bond_length_stddev_c_n = tuple(_PEPTIDE["c_n_length"][k][1] for k in ("other", "proline"))
between_res_cos_angles_c_n_ca: tuple[float, float] = tuple(_PEPTIDE["cos_c_n_ca"])
between_res_cos_angles_ca_c_n: tuple[float, float] = tuple(_PEPTIDE["cos_ca_c_n"])


def _frame(ex: np.ndarray, ey: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Return the 4x4 transform with x axis along ``ex``, y axis in the plane of ``ex`` and ``ey``."""
    x = ex / np.linalg.norm(ex)
    y = ey - np.dot(ey, x) * x
    y = y / np.linalg.norm(y)
    out = np.eye(4)
    out[:3] = np.stack([x, y, np.cross(x, y), origin], axis=1)
    return out


def _default_frames(residue: dict[str, Any]) -> np.ndarray:
    """Return each rigid group's frame ``[8, 4, 4]`` in its parent's frame, with torsion angles of zero.

    Missing groups are zero matrices, as in AlphaFold's table.
    """
    pos = {name: np.array(xyz) for name, _, xyz in residue["atoms"]}
    frames = np.zeros((8, 4, 4))
    frames[:2] = np.eye(4)
    frames[2] = _frame(pos["N"] - pos["CA"], np.array([1.0, 0.0, 0.0]), pos["N"])
    frames[3] = _frame(pos["C"] - pos["CA"], pos["CA"] - pos["N"], pos["C"])
    for i, atoms in enumerate(residue["chi_atoms"]):
        if i == 0:
            a, b, c = (pos[name] for name in atoms[:3])
            frames[4] = _frame(c - b, a - b, c)
        else:
            axis_end = pos[atoms[2]]
            frames[4 + i] = _frame(axis_end, np.array([-1.0, 0.0, 0.0]), axis_end)
    return frames


restype_atom14_names: list[list[str]] = [
    [atom[0] for atom in r["atoms"]] + [""] * (14 - len(r["atoms"])) for r in _RESIDUES
] + [[""] * 14]

restype_atom14_to_atom37 = np.array(
    [[atom_order.get(name, 0) for name in names] for names in restype_atom14_names], np.int32
)
"""``[21, 14]``: atom37 slot of each atom14 slot (0 for empty slots)."""
restype_atom14_mask = np.array([[bool(n) for n in names] for names in restype_atom14_names], np.float32)
restype_atom37_to_atom14 = np.zeros((21, 37), np.int32)
restype_atom37_mask = np.zeros((21, 37), np.float32)
restype_atom14_to_rigid_group = np.zeros((21, 14), np.int32)
restype_atom14_rigid_group_positions = np.zeros((21, 14, 3), np.float32)
restype_rigid_group_default_frame = np.zeros((21, 8, 4, 4))
restype_atom14_is_ambiguous = np.zeros((21, 14), np.float32)
restype_atom14_renaming = np.tile(np.arange(14, dtype=np.int32), (21, 1))
"""``[21, 14]``: atom14 slot that holds the same atom under the residue's alternative naming (180° symmetry)."""
chi_angles_mask = np.zeros((21, 4), np.float32)
chi_pi_periodic = np.zeros((21, 4), np.float32)
chi_atom_indices = np.zeros((21, 4, 4), np.int32)
"""``[21, 4, 4]``: atom37 indices of the four atoms that define each chi angle."""
restype_rigidgroup_mask = np.zeros((21, 8), np.float32)
restype_rigidgroup_base_atom37 = np.zeros((21, 8, 3), np.int32)
"""``[21, 8, 3]``: atom37 indices of the three atoms that span each rigid group's frame."""
for _g, _base in {0: ("C", "CA", "N"), 3: ("CA", "C", "O")}.items():  # also for unknown residues
    restype_rigidgroup_mask[:, _g] = 1.0
    restype_rigidgroup_base_atom37[:, _g] = [atom_order[name] for name in _base]

for _i, _residue in enumerate(_RESIDUES):
    _slot = {name: j for j, name in enumerate(restype_atom14_names[_i]) if name}
    for _j, (_name, _group, _xyz) in enumerate(_residue["atoms"]):
        restype_atom37_to_atom14[_i, atom_order[_name]] = _j
        restype_atom37_mask[_i, atom_order[_name]] = 1.0
        restype_atom14_to_rigid_group[_i, _j] = _group
        restype_atom14_rigid_group_positions[_i, _j] = _xyz
    restype_rigid_group_default_frame[_i] = _default_frames(_residue)
    for _a, _b in _residue["ambiguous"].items():
        restype_atom14_renaming[_i, [_slot[_a], _slot[_b]]] = _slot[_b], _slot[_a]
        restype_atom14_is_ambiguous[_i, [_slot[_a], _slot[_b]]] = 1.0
    chi_pi_periodic[_i] = _residue["chi_pi_periodic"]
    for _k, _atoms in enumerate(_residue["chi_atoms"]):
        chi_angles_mask[_i, _k] = 1.0
        chi_atom_indices[_i, _k] = [atom_order[name] for name in _atoms]
        restype_rigidgroup_mask[_i, 4 + _k] = 1.0
        restype_rigidgroup_base_atom37[_i, 4 + _k] = chi_atom_indices[_i, _k, 1:]


UNKNOWN_LETTERS = "".join(sorted(set(string.ascii_uppercase) - {*restypes, "X"}))  #: BJOUZ
_TO_X = str.maketrans(UNKNOWN_LETTERS, "X" * len(UNKNOWN_LETTERS))


def mask_unknown(sequence: str) -> str:
    """Return the sequence in upper case, with B, J, O, U, Z read as X (as in AlphaFold)."""
    return sequence.upper().translate(_TO_X)


def sequence_to_aatype(sequence: str) -> np.ndarray:
    """Return residue types ``[N]`` int32 of a one-letter sequence; unknown letters become 20."""
    return np.array([restype_order.get(letter, unk_restype_index) for letter in sequence], np.int32)


def aatype_to_sequence(aatype: np.ndarray) -> str:
    """Return the one-letter sequence of residue types ``[N]``; types past 19 become ``X``."""
    return "".join(restypes_with_x[min(int(a), unk_restype_index)] for a in aatype)


def stereochemistry() -> tuple[list[Any], list[Any]]:
    """Return bonds and angles of the twenty residues (Engh and Huber), lengths in angstrom, angles in degrees.

    A bond is ``[residue, atom, atom, mean, standard deviation]``, an angle ``[residue, atom, vertex atom, atom, mean,
    standard deviation]``.
    """
    data = package_json("fastfold.protein", "stereochemistry.json")
    return data["bonds"], data["angles"]
