"""Regions of the Ramachandran plot agree with MolProbity's, which were drawn from other structures."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.validation.ramachandran import (
    KINDS,
    interpolate,
    ramachandran_regions,
    rarity,
    residue_kinds,
)

ANGLES = np.arange(-170.0, 190.0, 20.0)

# Regions by MolProbity's contours of the Top8000 chains (Richardson laboratory, Duke University; CC BY 4.0): f for
# favoured, a for allowed, a point for outliers; a line for each phi of ANGLES, a letter for each psi.
TOP8000 = {
    "general": (
        "aa..........aaaaff",
        "fa.aaaaaaaaaaaffff",
        "faaaaaafffffafffff",
        "aaaaaafffffaafffff",
        "faaaaaffffaaffffff",
        "a....afffa.aaaffff",
        ".....aff......aff.",
        ".....aa.......aa..",
        "..................",
        "..................",
        "...........aa.....",
        ".afa......ffa.....",
        "aaaa.aaaaffaaaa.aa",
        "........aa........",
        "..................",
        "..................",
        "..................",
        ".................a",
    ),
    "isoleucine or valine": (
        "...............aaa",
        "a.........a..aaffa",
        "a....aaaffaaaaffff",
        "a...aaffffaaaaffff",
        "a....affffa.affffa",
        ".....afffa...afffa",
        "......ff......afa.",
        "..................",
        "..................",
        "..................",
        "...........a......",
        "..........aaa.....",
        ".....aa...........",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
    ),
    "before proline": (
        "a..........aaaaaff",
        "a..........affffff",
        "a.........afffffff",
        "a......aa..aafffff",
        "a.....aaa....affff",
        "a....afaa.....ffff",
        ".....aff......affa",
        "......a.......aa..",
        "..................",
        "..................",
        "...........aa.....",
        "...........ff.....",
        "...........aa...aa",
        "..................",
        "..................",
        "..................",
        "..................",
        "................aa",
    ),
    "glycine": (
        "ffaa......aaa.aaff",
        "ffaa....aaaaaaafff",
        "fffaaaaafffaaaafff",
        "fffffaaffffaaaffff",
        "fffaaafffffffaffff",
        "fa...affffaaaaffff",
        ".....affa.....affa",
        "......a........a..",
        "..................",
        "..................",
        "..a........a......",
        "affa.....affa.....",
        "ffffaaaaffffa...af",
        "ffffafffffffaaafff",
        "ffffaaaffffaafffff",
        "fffaaaafffaaaaafff",
        "fffaaaaaaa....aaff",
        "ffaa.aaa......aaff",
    ),
    "trans-proline": (
        "..................",
        "..................",
        "..................",
        "..................",
        "a......affaaaaaaff",
        "a.....affaaaaaffff",
        "......ffa.....affa",
        "......a...........",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
    ),
    "cis-proline": (
        "..................",
        "..................",
        "..................",
        "a.......fffa...aaf",
        "fa.....ffffa..afff",
        "fa....afff....afff",
        ".......a.......afa",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
        "..................",
    ),
}


def _regions(kind: int) -> np.ndarray:
    phi, psi = (x.ravel() for x in np.meshgrid(ANGLES, ANGLES, indexing="ij"))
    return ramachandran_regions(phi, psi, np.full(len(phi), kind))


def test_regions_agree_with_molprobity_s() -> None:
    """On a grid, where most points are near a contour; never favoured in one and an outlier in the other."""
    assert tuple(TOP8000) == KINDS
    for kind, lines in enumerate(TOP8000.values()):
        expected = np.array(["fa.".index(letter) for letter in "".join(lines)])
        found = _regions(kind)
        assert np.abs(found - expected).max() < 2, KINDS[kind]
        assert (found == expected).mean() > 0.88, KINDS[kind]


def test_phi_and_psi_are_not_exchanged_nor_mirrored() -> None:
    """Helices are favoured, their mirror image and their exchange are not."""
    points = np.array([[-63.0, -43.0], [-120.0, 130.0], [63.0, 43.0], [130.0, -120.0], [60.0, -60.0]])
    found = ramachandran_regions(points[:, 0], points[:, 1], np.zeros(5, int))
    assert found.tolist() == [0, 0, 0, 2, 2]
    as_valine = ramachandran_regions(
        points[:, 0], points[:, 1], np.full(5, KINDS.index("isoleucine or valine"))
    )
    assert as_valine.tolist() == [0, 0, 2, 2, 2]  # a branched residue in the left-handed helix


def test_glycine_is_symmetric_and_ends_are_undefined() -> None:
    glycine = KINDS.index("glycine")
    phi, psi = np.array([80.0, -80.0, 170.0]), np.array([5.0, -5.0, -175.0])
    found = rarity(phi, psi, np.full(3, glycine))
    mirrored = rarity(-phi, -psi, np.full(3, glycine))
    assert np.allclose(found, mirrored, atol=0.05)
    nan = np.nan
    assert ramachandran_regions(
        np.array([nan, -63.0]), np.array([-43.0, nan]), np.zeros(2, int)
    ).tolist() == [-1, -1]


def test_kinds_follow_residues_their_neighbours_and_omega() -> None:
    aatype = rc.sequence_to_aatype("AIVGPPIGA")
    before = np.append(aatype[1:] == rc.restype_order["P"], False)
    omega = np.array([np.nan, 180, -175, 180, 3, 178, 180, 180, 180])
    assert [KINDS[kind] for kind in residue_kinds(aatype, before, omega)] == [
        *("general", "isoleucine or valine", "isoleucine or valine", "glycine", "cis-proline"),
        *("trans-proline", "isoleucine or valine", "glycine", "general"),
    ]
    assert (
        KINDS[residue_kinds(rc.sequence_to_aatype("AP"), np.array([True, False]), omega[:2])[0]]
        == "before proline"
    )


def test_values_between_centres_are_linear_and_wrap_around() -> None:
    grid = np.zeros((2, 4, 4))
    grid[1, 0, 3], grid[1, 3, 3] = 1.0, 3.0  # centres at -135 and 135
    found = interpolate(grid, np.array([-135.0, 180.0, -180.0, -112.5]), np.full(4, 135.0), np.ones(4, int))
    assert np.allclose(found, [1.0, 2.0, 2.0, 0.75])
    assert np.allclose(interpolate(grid, np.array([-135.0]), np.array([157.5]), 1), [0.75])
