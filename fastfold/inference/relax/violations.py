"""Residues with violated stereochemistry: AlphaFold's measure (supplement, section 1.9.11) and further ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastfold.evoformer.config import model_config
from fastfold.evoformer.losses.violation import find_violations
from fastfold.inference.relax import stereo
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import gather_atoms, lookup
from fastfold.protein.labels import AuthorNames, residue_label
from fastfold.protein.protein import Protein


@dataclass(frozen=True)
class Violation:
    """Residue with violations."""

    index: int  #: Index in the protein's arrays
    residue: str  #: Name, for example ``LYS 15 of chain A``
    #: ``clash`` (atoms of two residues overlap by more than 1.5 Å), ``bond`` (a peptide bond or an adjacent angle is
    #: off by more than 12 standard deviations, or a backbone bond by 0.2 Å), ``geometry`` (distances within the
    #: residue are), ``chirality`` (a carbon has the wrong hand), ``omega`` (a peptide bond is more than 45° from cis
    #: and trans)
    kinds: tuple[str, ...]


def violating_residues(protein: Protein, names: AuthorNames | None = None) -> tuple[Violation, ...]:
    """Return all residues with a violation; residues of unknown type are not checked."""
    aatype = torch.from_numpy(protein.aatype).long()
    index = lookup("restype_atom14_to_atom37", aatype)
    exists = torch.from_numpy(protein.atom_mask).gather(-1, index) * lookup("restype_atom14_mask", aatype)
    batch = {
        "atom14_atom_exists": exists,
        "residue_index": torch.from_numpy(protein.residue_index),
        "aatype": aatype,
        "asym_id": torch.from_numpy(protein.chain_index),
    }
    positions = gather_atoms(torch.from_numpy(protein.atom_positions), index)
    found = find_violations(positions, batch, model_config("model_1").model.heads.structure_module)
    between, within = found["between_residues"], found["within_residues"]
    masks = {
        "clash": between["clashes_per_atom_clash_mask"].amax(-1) > 0.5,
        "bond": (between["connections_per_residue_violation_mask"] > 0.5)
        | torch.from_numpy(stereo.stretched_residues(protein)),
        "geometry": within["per_atom_violations"].amax(-1) > 0.5,
        "chirality": torch.from_numpy(stereo.wrong_hands(protein)),
        "omega": torch.from_numpy(stereo.twisted_residues(protein)),
    }
    some = torch.stack(list(masks.values())).any(0)
    return tuple(
        Violation(i, residue_label(protein, i, names), tuple(kind for kind, mask in masks.items() if mask[i]))
        for i in some.nonzero()[:, 0].tolist()
        if protein.aatype[i] != rc.unk_restype_index
    )
