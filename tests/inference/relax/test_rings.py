"""A side chain through a ring is placed again, and a backbone through a ring is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastfold.inference.relax import RelaxConfig, minimize, relax
from fastfold.inference.relax.minimize import Minimized
from fastfold.inference.relax.prepare import PreparedStructure
from fastfold.inference.relax.stereo import describe_ring, rings_with_bonds, side_chains_to_rebuild
from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains.rings import ring_slots
from tests.helpers.peptides import helix

CPU = RelaxConfig(platform="CPU", threads=1)


def pierced(first: str, second: str, *bond: str) -> Protein:
    """Return two peptides; a bond of the second one's middle residue passes through the first one's middle ring."""
    protein = helix(first, second, apart=60.0)
    middle, count = len(first) // 2, len(first)
    other = count + len(second) // 2
    xyz = protein.atom_positions.astype(np.float64)
    ring = xyz[middle, ring_slots(int(protein.aatype[middle]))[0]]
    center = ring.mean(0)
    normal = np.cross(ring[0] - center, ring[1] - center)
    normal /= np.linalg.norm(normal)
    if normal @ (center - xyz[middle, rc.atom_order["CA"]]) < 0:
        normal = -normal
    start, end = (xyz[other, rc.atom_order[name]] for name in bond)
    direction = (end - start) / np.linalg.norm(end - start)
    # The rotation that takes the bond's direction to the ring's normal, from outside inwards.
    target = -normal
    axis, cosine = np.cross(direction, target), direction @ target
    cross = np.array([[0, -axis[2], axis[1]], [axis[2], 0, -axis[0]], [-axis[1], axis[0], 0]])
    rotation = np.eye(3) + cross + cross @ cross / (1 + cosine)
    xyz[count:] = (xyz[count:] - 0.5 * (start + end)) @ rotation.T + center
    return replace(protein, atom_positions=xyz * (protein.atom_mask > 0.5)[..., None])


def test_a_lysine_is_pulled_out_of_a_ring() -> None:
    protein = pierced("AFA", "AKA", "CE", "NZ")
    (ring,) = rings_with_bonds(protein)
    assert describe_ring(ring, protein) == "PHE 2 of chain A by CE-NZ of LYS 2 of chain B"
    assert side_chains_to_rebuild([ring], protein) == {1, 4}
    found = relax(protein, CPU)
    assert found.minimized
    assert rings_with_bonds(found.protein) == ()
    assert found.pierced_rings == ()
    assert found.side_chains_rebuilt == ("PHE 2 of chain A", "LYS 2 of chain B")
    assert found.to_dict()["side_chains_rebuilt"] == list(found.side_chains_rebuilt)
    assert "placed again to free rings: PHE 2 of chain A, LYS 2 of chain B" in str(found)


def test_a_backbone_that_stays_in_a_proline_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(prepared: PreparedStructure, *args: Any, **kwargs: Any) -> Minimized:
        return Minimized(prepared.positions, 0.0, -1.0, 0.0, 1, False)

    monkeypatch.setattr(minimize, "minimize", stuck)
    protein = pierced("APA", "AGA", "N", "CA")
    rings = rings_with_bonds(protein)
    assert describe_ring(rings[0], protein) == "PRO 2 of chain A by N-CA of GLY 2 of chain B"
    assert side_chains_to_rebuild(rings, protein) == set()
    found = relax(protein, CPU)
    assert not found.relaxed
    assert found.side_chains_rebuilt == ()
    assert found.pierced_rings
    assert found.to_dict()["pierced_rings"] == list(found.pierced_rings)
    assert f"bonds pass through rings: {found.pierced_rings[0]}" in found.reason
    assert "GLY 2 of chain B" in str(found)


def test_a_peptide_bond_of_two_residues_names_both() -> None:
    protein = helix("AAA")
    ring = rings_with_bonds(pierced("AFA", "AKA", "CE", "NZ"))[0]
    bond = ((0, rc.atom_order["C"]), (1, rc.atom_order["N"]))
    text = describe_ring(replace(ring, bond=bond), protein)
    assert text == "ALA 2 of chain A by C-N of ALA 1 of chain A and ALA 2 of chain A"


def test_sound_peptides_are_left_alone() -> None:
    found = relax(helix("AFKAW"), CPU)
    assert (found.side_chains_rebuilt, found.pierced_rings) == ((), ())
