"""Scores without superposition: hand-computed cases and the conventions that lDDT prescribes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.lddt import (
    LDDT_OTHER_NAMES,
    count_clashes,
    drmsd,
    lddt,
    lddt_all_atom,
    lddt_interface,
)
from tests.helpers.structures import make_protein

LETTERS = "".join(rc.restypes)


def _structure(sequence: str = LETTERS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    protein = make_protein(sequence, seed=seed)
    positions = torch.from_numpy(protein.atom_positions).double() / 5.0
    return positions, torch.from_numpy(protein.atom_mask).double(), torch.from_numpy(protein.aatype).long()


def _swap(positions: torch.Tensor, aatype: torch.Tensor) -> torch.Tensor:
    names = torch.from_numpy(LDDT_OTHER_NAMES)[aatype]
    return positions.gather(1, names[..., None].expand(-1, -1, 3))


def test_drmsd_of_hand_computed_points() -> None:
    """Distances 3, 4, 5 become 3, 4 and the root of 31: one of three differs."""
    reference = torch.tensor([[3.0, 0, 0], [0, 0, 0], [0, 4.0, 0]])
    predicted = torch.tensor([[3.0, 0, 0], [0, 0, 0], [-1.0, 15**0.5, 0]])
    assert drmsd(predicted, reference, torch.ones(3)).item() == pytest.approx(
        abs((16 + 15) ** 0.5 - 5) / 3**0.5, rel=1e-5
    )
    assert drmsd(predicted, reference, torch.tensor([1.0, 1.0, 0.0])).item() == pytest.approx(0.0, abs=1e-5)
    assert drmsd(predicted, reference, torch.zeros(3)).item() == 0.0


def test_points_that_do_not_count_may_have_any_value() -> None:
    reference = torch.eye(3).repeat(4, 1).cumsum(0)
    mask = torch.arange(12) != 5
    predicted = (2 * reference).masked_fill(~mask[:, None], torch.nan)
    assert drmsd(predicted, reference, mask) == drmsd(2 * reference, reference, mask)
    assert torch.equal(lddt(predicted, reference, mask)[mask], lddt(2 * reference, reference, mask)[mask])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_positions_that_are_not_finite_are_wrong(wrong: float) -> None:
    """A reference without positions has no distance that a prediction could keep."""
    reference = torch.eye(3).repeat(4, 1).cumsum(0)
    lost = torch.full_like(reference, wrong)
    for pair in ((lost, reference), (reference, lost)):
        assert float(lddt(*pair, torch.ones(12), per_residue=False)) == pytest.approx(0.0, abs=1e-9)


def test_drmsd_and_lddt_are_batched() -> None:
    torch.manual_seed(0)
    predicted, reference = torch.randn(2, 3, 9, 3) * 5, torch.randn(2, 3, 9, 3) * 5
    mask = (torch.rand(2, 3, 9) < 0.8).float()
    for score in (drmsd, lddt):
        batched = score(predicted, reference, mask)
        torch.testing.assert_close(batched[1, 2], score(predicted[1, 2], reference[1, 2], mask[1, 2]))


def test_lddt_counts_missing_points_as_wrong() -> None:
    """Three points within the radius: without the third in the prediction one of three distances is left."""
    points = torch.tensor([[0.0, 0, 0], [4.0, 0, 0], [8.0, 0, 0]])
    has = torch.tensor([1.0, 1.0, 0.0])
    found = lddt(points, points, torch.ones(3), predicted_mask=has, per_residue=False)
    assert found.item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_and_boolean_masks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = 5 * torch.randn(12, 3, generator=generator)
    predicted = reference + torch.randn(12, 3, generator=generator)
    predicted, reference = predicted.to(dtype), reference.to(dtype)
    mask = torch.arange(12) % 4 != 0
    for score in (lddt, drmsd):
        exact = score(predicted.double(), reference.double(), mask.double())
        torch.testing.assert_close(score(predicted, reference, mask).double(), exact, rtol=1e-6, atol=1e-6)


def test_all_atom_lddt_of_hand_computed_atoms() -> None:
    """Two glycines: N, CA of the first against CA of the second; distances within a residue do not count."""
    reference, mask = torch.zeros(2, 37, 3), torch.zeros(2, 37)
    n, ca = rc.atom_order["N"], rc.atom_order["CA"]
    mask[0, n] = mask[0, ca] = mask[1, ca] = 1.0
    reference[0, ca, 0], reference[1, ca, 0] = 1.5, 5.0
    predicted = reference.clone()
    predicted[0, n, 0] -= 1.7  # 5.0 becomes 6.7: two of four thresholds
    glycines = torch.full((2,), rc.restype_order["G"])
    assert lddt_all_atom(predicted, reference, mask, glycines).item() == pytest.approx(0.75)
    assert lddt_all_atom(predicted, reference, mask, glycines, cutoff=4.0).item() == 1.0
    missing = mask.clone()
    missing[0, n] = 0.0
    assert lddt_all_atom(
        predicted, reference, mask, glycines, predicted_mask=missing, per_residue=True
    ).tolist() == pytest.approx([0.5, 0.5])
    assert lddt_all_atom(predicted, reference, torch.zeros(2, 37), glycines).item() == 1.0


def test_all_atom_lddt_is_the_definition() -> None:
    """Without ambiguous atoms, the plain double loop over atom pairs."""
    positions, mask, aatype = _structure("ACGHIKMNPQSTW")
    torch.manual_seed(1)
    predicted = positions + torch.randn_like(positions)
    residues = (mask > 0.5).nonzero()[:, 0].tolist()
    true, found = (
        (atoms[:, None] - atoms).norm(dim=-1).tolist()
        for atoms in (positions[mask > 0.5], predicted[mask > 0.5])
    )
    score, count = np.zeros(len(aatype)), np.zeros(len(aatype))
    for i, r in enumerate(residues):
        for j, s in enumerate(residues):
            if r != s and true[i][j] < 15.0:
                error = abs(found[i][j] - true[i][j])
                score[r] += sum(error < limit for limit in (0.5, 1.0, 2.0, 4.0)) / 4
                count[r] += 1
    by_residue = lddt_all_atom(predicted, positions, mask, aatype, per_residue=True)
    np.testing.assert_allclose(by_residue.numpy(), score / count)
    total = lddt_all_atom(predicted, positions, mask, aatype).item()
    assert total == pytest.approx(score.sum() / count.sum())


def test_all_atom_lddt_takes_the_better_names() -> None:
    """A prediction with all equivalent atoms exchanged is as good as one without; other exchanges are errors."""
    positions, mask, aatype = _structure()
    swapped = _swap(positions, aatype)
    assert not torch.equal(swapped, positions)
    assert lddt_all_atom(swapped, positions, mask, aatype).item() == 1.0
    wrong = positions.clone()
    threonine = LETTERS.index("T")
    og, cg = rc.atom_order["OG1"], rc.atom_order["CG2"]
    wrong[threonine, [og, cg]] = positions[threonine, [cg, og]]
    assert lddt_all_atom(wrong, positions, mask, aatype).item() < 1.0


def test_names_are_chosen_for_each_residue() -> None:
    positions, mask, aatype = _structure("DEFRDVLY", seed=3)
    mixed = torch.where((torch.arange(8) % 2 == 0)[:, None, None], _swap(positions, aatype), positions)
    assert lddt_all_atom(mixed, positions, mask, aatype).item() == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_names_at_an_interface_are_chosen_by_distances_between_chains(seed: int) -> None:
    """The plain loops: each residue takes the names that keep more distances to unambiguous atoms of other chains.

    Some residues of the prediction have exchanged names, and noise makes distances within the chains prefer others.
    """
    sequence = "DEFRVLYADKEFRLVY"
    positions, mask, aatype = _structure(sequence, seed=seed)
    chain = torch.arange(16) // 8
    positions[8:] += positions[:8].mean((0, 1)) - positions[8:].mean((0, 1))
    torch.manual_seed(seed)
    exchanged = torch.rand(16, 1, 1) < 0.5
    predicted = torch.where(exchanged, _swap(positions, aatype), positions) + 0.7 * torch.randn_like(
        positions
    )
    atoms = [(r, a) for r in range(16) for a in range(37) if mask[r, a] > 0.5]
    other = LDDT_OTHER_NAMES[aatype.numpy()]
    true, found = positions.numpy(), predicted.numpy()

    def share(names: np.ndarray, one: tuple[int, int], two: tuple[int, int]) -> float | None:
        distance = np.linalg.norm(true[one] - true[two])
        if chain[one[0]] == chain[two[0]] or distance >= 15.0:
            return None
        (r, a), (s, b) = one, two
        error = abs(np.linalg.norm(found[r, names[r, a]] - found[s, names[s, b]]) - distance)
        return sum(error < limit for limit in (0.5, 1.0, 2.0, 4.0)) / 4

    straight = np.tile(np.arange(37), (16, 1))
    names = straight.copy()
    fixed = [(s, b) for s, b in atoms if other[s, b] == b]
    for r in range(16):
        swapped = straight.copy()
        swapped[r] = other[r]
        mine = [(q, a) for q, a in atoms if q == r and other[q, a] != a]
        gain = [
            (share(swapped, one, two) or 0.0) - (share(straight, one, two) or 0.0)
            for one in mine
            for two in fixed
        ]
        if sum(gain) > 0:
            names[r] = other[r]
    assert (names != straight).any()
    shares = [share(names, one, two) for one in atoms for two in atoms if one < two]
    expected = np.mean([one for one in shares if one is not None])
    assert lddt_interface(predicted, positions, mask, aatype, chain) == pytest.approx(expected)
    exact = torch.where(exchanged, _swap(positions, aatype), positions)
    assert lddt_interface(exact, positions, mask, aatype, chain) == 1.0


def test_names_at_an_interface_ignore_distances_within_the_chain() -> None:
    """An aspartate whose own chain wants one naming, by more distances, and the other chain the other one."""
    ca, first, second = (rc.atom_order[name] for name in ("CA", "OD1", "OD2"))
    true, mask = torch.zeros(4, 37, 3), torch.zeros(4, 37)
    mask[0, [first, second]] = mask[1:, ca] = 1.0
    true[0, first, 0], true[0, second, 0] = 1.0, -1.0
    true[1:, ca, 0] = torch.tensor([3.0, 3.2, -3.0])
    predicted = true.clone()
    predicted[3, ca, 0] = 3.1
    aatype = torch.tensor([rc.restype_order[letter] for letter in "DGGG"])
    # Both distances of the aspartate to the other chain are kept, and none of the two glycines.
    found = lddt_interface(predicted, true, mask, aatype, torch.tensor([0, 0, 0, 1]))
    assert found == pytest.approx(0.5)


def test_equivalent_atoms_include_those_of_the_network() -> None:
    """AlphaFold's ambiguous atoms are lDDT's, less those of arginine, leucine and valine."""
    for i, letter in enumerate(rc.restypes):
        names = rc.restype_atom14_names[i]
        network = {
            (names[a], names[b]) for a, b in enumerate(rc.restype_atom14_renaming[i]) if a != b and names[a]
        }
        ours = {(rc.atom_types[a], rc.atom_types[b]) for a, b in enumerate(LDDT_OTHER_NAMES[i]) if a != b}
        assert (ours == network) == (letter not in "RLV"), letter
        assert network <= ours


def test_clashes_of_hand_placed_atoms() -> None:
    """Carbon radii are 1.7 Å, so two carbons clash under 1.9 Å; bonds between neighbours and bridges do not."""
    names = [(0, "CA"), (1, "CA"), (2, "C"), (3, "N"), (4, "SG"), (9, "SG"), (5, "C"), (7, "N")]
    positions, mask = torch.zeros(10, 37, 3), torch.zeros(10, 37)
    for k, (residue, name) in enumerate(names):
        mask[residue, rc.atom_order[name]] = 1.0
        # Pairs of names stand 1.8 Å apart, far from all others; a sulphur bridge stands closer.
        positions[residue, rc.atom_order[name]] = torch.tensor([50.0 * (k // 2), 1.8 * (k % 2), 0.0])
    positions[9, rc.atom_order["SG"], 1] = 1.0
    positions[7, rc.atom_order["N"], 1] = 1.3
    index, chain = torch.arange(10), torch.zeros(10, dtype=torch.long)
    assert (
        count_clashes(positions, mask, index, chain) == 2
    )  # CA-CA, and C-N of residues that are not neighbours
    assert count_clashes(positions, mask, index, chain, tolerance=1.7) == 1
    assert count_clashes(positions, mask, index + 5 * (index > 2), chain) == 2
    positions[3, rc.atom_order["N"], 1] = 1.3
    assert count_clashes(positions, mask, index, chain) == 2
    assert count_clashes(positions, mask, index, (index > 2).long()) == 3
    assert count_clashes(positions, mask, index + 5 * (index > 2), chain) == 3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_rigid_motion_changes_no_score(seed: int) -> None:
    positions, mask, aatype = _structure(seed=seed % 100)
    generator = torch.Generator().manual_seed(seed)
    predicted = positions + torch.randn(positions.shape, generator=generator).double()
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator).double())
    moved = predicted @ (turn * torch.linalg.det(turn)).mT + 20.0
    ca = rc.atom_order["CA"]
    torch.testing.assert_close(
        lddt_all_atom(moved, positions, mask, aatype), lddt_all_atom(predicted, positions, mask, aatype)
    )
    for score in (lddt, drmsd):
        torch.testing.assert_close(
            score(moved[:, ca], positions[:, ca], mask[:, ca]),
            score(predicted[:, ca], positions[:, ca], mask[:, ca]),
        )
    assert lddt_all_atom(positions, positions, mask, aatype).item() == 1.0
    assert drmsd(positions[:, ca], positions[:, ca], mask[:, ca]).item() == 0.0
