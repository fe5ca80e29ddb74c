"""Invented structures for the tests of structure files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from Bio.PDB import PDBParser
from hypothesis import strategies as st

from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import PDB_CHAIN_IDS, Protein


def make_protein(*sequences: str, seed: int = 0, first_number: int = 1, **changes: Any) -> Protein:
    """Chains of these sequences with random coordinates and one random B-factor per residue."""
    rng = np.random.default_rng(seed)
    aatype = rc.sequence_to_aatype("".join(sequences))
    lengths = [len(sequence) for sequence in sequences]
    fields = {
        "atom_positions": rng.normal(scale=30.0, size=(len(aatype), 37, 3)),
        "atom_mask": rc.restype_atom37_mask[aatype],
        "aatype": aatype,
        "residue_index": np.concatenate([np.arange(length) + first_number for length in lengths]),
        "chain_index": np.repeat(np.arange(len(lengths)), lengths),
        "b_factors": rng.uniform(0, 100, len(aatype))[:, None] * np.ones((1, 37)),
    }
    return Protein(**(fields | changes))


@st.composite
def proteins(draw: st.DrawFn, max_chains: int = 4, max_length: int = 12) -> Protein:
    """Any structure that a PDB file can hold: gaps in numbering, missing atoms and residues, extreme values."""
    sequences = draw(
        st.lists(
            st.text(alphabet="".join(rc.restypes_with_x), min_size=1, max_size=max_length),
            min_size=1,
            max_size=max_chains,
        )
    )
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    scale = draw(st.sampled_from([0.0004, 1.0, 300.0]))
    protein = make_protein(*sequences, seed=seed)
    mask = protein.atom_mask * (rng.random(protein.atom_mask.shape) < draw(st.sampled_from([0.2, 0.9, 1.0])))
    if not mask.any():
        mask[0, 0] = 1.0
    positions = np.clip(rng.standard_t(2, size=(*mask.shape, 3)) * scale, -999.999, 9999.999)
    gaps = draw(st.sampled_from([1, 40]))
    numbers = [rng.integers(1, gaps + 1, len(s)).cumsum() + rng.integers(-999, 1000) for s in sequences]
    return make_protein(
        *sequences,
        atom_positions=positions,
        atom_mask=mask,
        residue_index=np.concatenate(numbers),
        b_factors=rng.uniform(-99.99, 999.99, mask.shape),
    )


def assert_same_structure(found: Protein, expected: Protein, *, b_tolerance: float = 0.0051) -> None:
    """Equal in all but what files round: positions within 0.001 Å, B-factors within half a printed digit."""
    for field in ("aatype", "residue_index", "chain_index"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field), err_msg=field)
    np.testing.assert_array_equal(found.atom_mask > 0.5, expected.atom_mask > 0.5)
    present = expected.atom_mask > 0.5
    difference = np.abs(found.atom_positions.astype(float) - expected.atom_positions)[present]
    assert difference.max() <= 1e-3
    assert np.abs(found.b_factors.astype(float) - expected.b_factors)[present].max() <= b_tolerance


def protein_from_biopython(structure: Any, expected: Protein, chain_ids: Sequence[str]) -> Protein:
    """What Biopython's parser found, laid out like ``expected``; residues without atoms stay empty."""
    shape = expected.atom_mask.shape
    mask, b_factors, positions = np.zeros(shape), np.zeros(shape), np.zeros((*shape, 3))
    models = list(structure.get_models())
    assert len(models) == 1
    index = {
        (chain_ids[chain], int(number)): i
        for i, (chain, number) in enumerate(zip(expected.chain_index, expected.residue_index, strict=True))
    }
    for atom in models[0].get_atoms():
        residue = atom.get_parent()
        i = index[residue.get_parent().id, residue.id[1]]
        slot = rc.atom_order[atom.get_name()]
        assert residue.resname == rc.resnames[expected.aatype[i]]
        assert atom.element == atom.get_name()[0]
        assert atom.get_occupancy() == 1.0
        assert mask[i, slot] == 0, "atom given twice"
        mask[i, slot], b_factors[i, slot], positions[i, slot] = 1, atom.get_bfactor(), atom.coord
    return Protein(positions, mask, expected.aatype, expected.residue_index, expected.chain_index, b_factors)


def read_by_biopython(text: str, expected: Protein) -> Protein:
    """A PDB file that we wrote, as Biopython's strict parser reads it; laid out like ``expected``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        structure = PDBParser(PERMISSIVE=False, QUIET=False).get_structure("x", io.StringIO(text))
    return protein_from_biopython(structure, expected, PDB_CHAIN_IDS)
