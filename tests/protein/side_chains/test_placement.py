"""Placed side chains: rotamers of real chains come back, kept atoms stay, and nothing is left to chance."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace

import gemmi
import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import follows
from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.lddt import count_clashes
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains import placement
from fastfold.protein.side_chains.placement import PlacedSideChains, place_side_chains
from fastfold.protein.side_chains.rings import pierced_rings
from fastfold.protein.structure import structure_to_protein
from tests.conftest import require_shared
from tests.helpers.peptides import helix

CA = rc.atom_order["CA"]
KEPT = [rc.atom_order[name] for name in ("N", "CA", "C", "O", "CB", "OXT")]


def place(
    protein: Protein, rebuild: np.ndarray | None = None, hints: np.ndarray | None = None
) -> PlacedSideChains:
    return place_side_chains(
        protein.atom_positions,
        protein.atom_mask,
        protein.aatype,
        chain_index=protein.chain_index,
        residue_index=protein.residue_index,
        rebuild=rebuild,
        hints=hints,
    )


def chi(positions: np.ndarray, aatype: int, number: int) -> float:
    """Return a chi angle by gemmi."""
    slots = rc.chi_atom_indices[aatype, number]
    return float(
        np.degrees(gemmi.calculate_dihedral(*(gemmi.Position(*positions[s].tolist()) for s in slots)))
    )


def apart(a: float, b: float) -> float:
    return abs((a - b + 180.0) % 360.0 - 180.0)


def test_residues_that_are_not_rebuilt_stay_byte_for_byte() -> None:
    protein = helix("AKLFRDEWC", "MNPQRSTVY")
    rebuild = np.arange(18) % 3 == 0
    placed = place(protein, rebuild)
    assert placed.positions.dtype == placed.mask.dtype == np.float32
    assert placed.positions[~rebuild].tobytes() == protein.atom_positions[~rebuild].tobytes()
    assert placed.positions[:, KEPT].tobytes() == protein.atom_positions[:, KEPT].tobytes()
    np.testing.assert_array_equal(placed.mask, protein.atom_mask)
    assert place(protein, rebuild).positions.tobytes() == placed.positions.tobytes()
    assert (placed.positions[0] == protein.atom_positions[0]).all()  # alanine has nothing to place
    assert (placed.positions[3] != protein.atom_positions[3]).any()
    nothing = place(protein)
    assert nothing.positions.tobytes() == protein.atom_positions.tobytes()


def test_atoms_of_the_input_that_are_not_known_do_not_count() -> None:
    protein = helix("AKLFRDEWC")
    mask = protein.atom_mask.copy()
    mask[[1, 3, 7], 5:] = 0
    noise = protein.atom_positions + (mask == 0)[..., None] * np.float32(1e3)
    first, second = (
        place(replace(protein, atom_mask=mask)),
        place(replace(protein, atom_positions=noise, atom_mask=mask)),
    )
    present = first.mask > 0.5
    assert first.positions[present].tobytes() == second.positions[present].tobytes()
    np.testing.assert_array_equal(first.mask, protein.atom_mask)


def test_residues_without_a_frame_and_unknown_ones_are_left_alone() -> None:
    protein = helix("AKLXA")
    mask = protein.atom_mask.copy()
    mask[1, [rc.atom_order[name] for name in ("N", "NZ")]] = 0
    mask[2, rc.atom_order["CD1"]] = 0
    placed = place(replace(protein, atom_mask=mask))
    np.testing.assert_array_equal(placed.mask[[0, 1, 3, 4]], mask[[0, 1, 3, 4]])
    np.testing.assert_array_equal(placed.mask[2], protein.atom_mask[2])


def test_a_hint_is_taken_if_it_does_not_clash() -> None:
    protein = helix("AAKAA")
    hints = np.full((5, 4), np.nan)
    hints[2] = [-100.0, 150.0, -140.0, 120.0]
    rebuild = np.arange(5) == 2
    placed = place(protein, rebuild, hints)
    for number in range(4):
        assert apart(chi(placed.positions[2], int(protein.aatype[2]), number), hints[2, number]) < 1.0
    hints[2, 3] = np.nan
    without = place(protein, rebuild, hints).positions
    assert without.tobytes() == place(protein, rebuild).positions.tobytes()


def valid_chains(count: int) -> Iterator[Protein]:
    with require_shared("data", "structures", "index.tsv").open(newline="") as index:
        names = sorted(
            row["name"] for row in csv.DictReader(index, delimiter="\t") if row["split"] == "valid"
        )
    for name in names[:: len(names) // count][:count]:
        yield structure_to_protein(
            read_structure(require_shared("data", "structures", "valid", f"{name}.pdb.gz"))
        )


def close_pair(first: str, second: str, seed: int) -> Protein:
    """Return two residues between alanines, 5 to 8 Å apart and turned at random."""
    protein = helix(f"A{first}A", f"A{second}A")
    generator = np.random.default_rng(seed)
    xyz = protein.atom_positions.astype(np.float64)
    for part in (slice(0, 3), slice(3, 6)):
        turn = Rotation.random(random_state=generator)
        xyz[part] = turn.apply((xyz[part] - xyz[part][1, CA]).reshape(-1, 3)).reshape(3, -1, 3)
    direction = generator.normal(size=3)
    xyz[3:] += direction / np.linalg.norm(direction) * generator.uniform(5.0, 8.0)
    return replace(protein, atom_positions=xyz.astype(np.float32))


@pytest.mark.parametrize(
    ("residues", "seed", "rebuild"),
    [("FK", 149, [1, 4]), ("FK", 149, [1]), ("WR", 149, [1, 4]), ("PL", 197, [1, 4]), ("WV", 1166, [4])],
)
def test_residues_whose_rotamers_all_pierce_a_ring_get_angles_between_them(
    monkeypatch: pytest.MonkeyPatch, residues: str, seed: int, rebuild: list[int]
) -> None:
    protein = close_pair(residues[0], residues[1], seed)
    tied = follows(protein.chain_index, protein.residue_index)
    is_rebuilt = np.isin(np.arange(6), rebuild)
    placed = place(protein, is_rebuilt)
    assert not pierced_rings(placed.positions, placed.mask, protein.aatype, tied)
    assert placed.positions[:, KEPT].tobytes() == protein.atom_positions[:, KEPT].tobytes()
    assert placed.positions[~is_rebuilt].tobytes() == protein.atom_positions[~is_rebuilt].tobytes()
    monkeypatch.setattr(placement, "place_again", lambda xyz, *_: xyz)
    rotamers_alone = place(protein, is_rebuilt)
    assert pierced_rings(rotamers_alone.positions, rotamers_alone.mask, protein.aatype, tied)


@pytest.mark.parametrize(("residues", "seed"), [("LM", 86), ("KR", 33), ("VI", 134)])
def test_residues_whose_rotamers_all_overlap_get_angles_between_them(
    monkeypatch: pytest.MonkeyPatch, residues: str, seed: int
) -> None:
    protein = close_pair(residues[0], residues[1], seed)
    rebuild = np.isin(np.arange(6), [1, 4])
    assert overlaps(place(protein, rebuild), protein) == 0
    monkeypatch.setattr(placement, "place_again", lambda xyz, *_: xyz)
    assert overlaps(place(protein, rebuild), protein) == 1


def overlaps(placed: PlacedSideChains, protein: Protein) -> int:
    arrays = (placed.positions, placed.mask, protein.residue_index, protein.chain_index)
    return count_clashes(*map(torch.as_tensor, arrays))


@pytest.mark.long
@pytest.mark.parametrize(
    ("share", "count", "seed"),
    [
        *((share, 6, 0) for share in (1.0, 0.3)),
        pytest.param(1.0, 30, 0, marks=pytest.mark.slow),
        *(pytest.param(0.3, 30, seed, marks=pytest.mark.slow) for seed in range(4)),
    ],
)
def test_chi1_of_real_chains_is_right_for_three_of_four_and_no_ring_is_pierced(
    share: float, count: int, seed: int
) -> None:
    """Chi angles are measured by gemmi; the chains were not used for the table."""
    generator = np.random.default_rng(seed)
    right = []
    for protein in valid_chains(count):
        rebuild = generator.random(len(protein)) < share
        placed = place(protein, rebuild)
        for i in np.flatnonzero(rebuild).tolist():
            aatype = int(protein.aatype[i])
            if not rc.chi_angles_mask[aatype, 0] or rc.restypes[aatype] == "P":
                continue
            slots = rc.chi_atom_indices[aatype, 0]
            if (protein.atom_mask[i, slots] > 0.5).all() and placed.mask[i, slots].all():
                before, after = (chi(x[i], aatype, 0) for x in (protein.atom_positions, placed.positions))
                right.append(apart(before, after) < 40.0)
        tied = follows(protein.chain_index, protein.residue_index)
        assert not pierced_rings(placed.positions, placed.mask, protein.aatype, tied)
    print(f"chi1 within 40 degrees for {np.mean(right):.1%} of {len(right)} residues")
    assert np.mean(right) > 0.77
