"""Figures of an interface between two helices."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.geometry import (
    count_chain_clashes,
    interface_geometry,
    touching_residues,
)
from tests.protein.metrics.interface.packed_helices import packed_helices


def test_figures_of_packed_helices() -> None:
    positions, mask, aatype, second = packed_helices()
    found = interface_geometry(positions, mask, aatype, second)
    # FreeSASA: twice 2520.97 less 4048.50 Å².
    assert found.buried_area == pytest.approx(993.4, rel=0.01)
    assert found.complementarity == pytest.approx(0.4136, abs=0.01)
    assert (found.bonds, found.unsatisfied) == (0, 0)
    assert found.residues.tolist() == touching_residues(positions, mask, second).tolist()
    near = "".join(np.array(list(rc.aatype_to_sequence(aatype)))[found.residues])
    assert found.hydrophobicity == pytest.approx(sum(one in "ACFILMPVWY" for one in near) / len(near))
    assert found.surface_hydrophobicity == pytest.approx(
        0.5
    )  # all of a lone helix is surface: A, L, V, of 12 six


def test_chains_apart_bury_nothing() -> None:
    positions, mask, aatype, second = packed_helices()
    apart = interface_geometry(positions + 30.0 * second[:, None, None], mask, aatype, second)
    assert apart.buried_area == pytest.approx(0.0, abs=1e-9)
    assert (apart.complementarity, apart.hydrophobicity, apart.residues.any()) == (None, None, False)


def test_a_buried_polar_atom_that_lost_its_water_is_unsatisfied() -> None:
    """A nitrogen of lysine between two cages of carbons: only together they bury it."""
    positions, mask = np.zeros((3, 37, 3)), np.zeros((3, 37))
    aatype = rc.sequence_to_aatype("KAA")
    positions[0, rc.atom_order["NZ"]], mask[0, rc.atom_order["NZ"]] = 0, 1
    directions = np.array(
        [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (1, 1, 1), (-1, 1, 1), (1, -1, 1), (-1, -1, 1)]
    )
    for residue, sign in ((1, 1), (2, -1)):
        for slot, way in zip(range(5, 13), directions * [1, 1, sign], strict=True):
            positions[residue, slot], mask[residue, slot] = 2.4 * way / np.linalg.norm(way), 1
        positions[residue, 13], mask[residue, 13] = (0, 0, 2.4 * sign), 1
    found = interface_geometry(positions, mask, aatype, np.array([False, False, True]))
    assert found.unsatisfied == 1
    assert found.bonds == 0
    # Both cages in one chain bury the nitrogen without a binder, which is far away.
    far = np.concatenate([positions, positions[2:] + 50.0]), np.concatenate([mask, mask[2:]])
    alone = interface_geometry(*far, np.r_[aatype, 0], np.array([False, False, False, True]))
    assert alone.unsatisfied == 0


def test_only_atoms_of_different_chains_clash() -> None:
    positions, mask = np.zeros((3, 37, 3)), np.zeros((3, 37))
    mask[:, 1] = 1
    positions[:, 1, 0] = [0.0, 2.3, 4.8]
    assert count_chain_clashes(positions, mask, np.array([0, 1, 1])) == 1
    assert count_chain_clashes(positions, mask, np.array([0, 0, 1])) == 0
