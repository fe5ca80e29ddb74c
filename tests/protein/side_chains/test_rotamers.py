"""The table of rotamers: probabilities, what is known of them, and interpolation over phi and psi."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.side_chains.rotamers import GRID_STEP, load_table, rotamers

HELIX, STRAND = (-63.0, -43.0), (-120.0, 130.0)
CHI1 = (-60.0, 60.0, 180.0)


def share(letter: str, torsions: tuple[float, float]) -> dict[float, float]:
    """Return the probability of each staggered chi1."""
    chi, energies = rotamers(rc.restype_order[letter], *torsions)
    near = np.array(CHI1)[np.abs((chi[:, :1] - CHI1 + 180) % 360 - 180).argmin(-1)]
    return {angle: float(np.exp(-energies)[near == angle].sum()) for angle in CHI1}


@pytest.mark.parametrize("letter", [x for x in rc.restypes if x not in "AG"])
def test_probabilities_add_up_to_one_but_for_rare_rotamers(letter: str) -> None:
    for torsions in (HELIX, STRAND, (np.nan, 30.0), (-75.0, 145.0)):
        total = sum(share(letter, torsions).values())
        assert 0.93 < total < 1.03


def test_rotamers_depend_on_the_backbone_as_is_known() -> None:
    """A helix forbids gauche+ of residues branched at CB but serine and threonine, and strands allow trans."""
    for letter in "ILFYWVKM":
        rare = 180.0 if letter == "I" else (-60.0 if letter == "V" else 60.0)
        assert share(letter, HELIX)[rare] < 0.15
    assert share("V", HELIX)[180.0] > 0.85
    assert share("I", HELIX)[-60.0] > 0.8
    assert share("T", HELIX)[180.0] < 0.03
    assert share("F", STRAND)[-60.0] > 0.5
    assert share("F", HELIX)[180.0] > 2 * share("F", STRAND)[180.0]


def test_phi_and_psi_are_not_exchanged() -> None:
    """Near phi -90 and psi 0, 60 validation chains have threonine at 60 in 40 of 42, leucine at -60 in 53 of 54."""
    bridge = (-90.0, 0.0)
    assert share("T", bridge)[60.0] > 0.85 > share("T", bridge[::-1])[60.0]
    assert share("L", bridge)[-60.0] > 0.9 > share("L", bridge[::-1])[-60.0]
    assert share("V", bridge)[-60.0] > 0.55 > share("V", bridge[::-1])[-60.0]


def test_points_between_grid_points_are_interpolated_and_angles_wrap() -> None:
    aatype = rc.restype_order["L"]

    def probabilities(phi: float, psi: float) -> np.ndarray:
        return np.exp(-rotamers(aatype, phi, psi)[1])

    corners = [probabilities(-60.0 + a, -60.0 + b) for a in (0, GRID_STEP) for b in (0, GRID_STEP)]
    middle = probabilities(-60.0 + GRID_STEP / 2, -60.0 + GRID_STEP / 2)
    np.testing.assert_allclose(middle, np.mean(corners, 0), atol=1e-9)
    quarter = probabilities(-60.0 + GRID_STEP / 4, -60.0)
    np.testing.assert_allclose(quarter, 0.75 * corners[0] + 0.25 * corners[2], atol=1e-9)
    for phi, psi in ((180.0, -180.0), (-180.0, 180.0), (179.999, 179.999)):
        np.testing.assert_allclose(
            rotamers(aatype, phi, psi)[1], rotamers(aatype, -180.0, -180.0)[1], atol=1e-2
        )


def test_residues_without_chi_angles_have_none() -> None:
    for aatype in (rc.restype_order["G"], rc.restype_order["A"], rc.unk_restype_index):
        chi, energies = rotamers(aatype, *HELIX)
        assert chi.shape == (0, 4)
        assert energies.shape == (0,)


def test_the_table_states_its_source() -> None:
    assert "Protein Data Bank" in str(load_table()["source"])
