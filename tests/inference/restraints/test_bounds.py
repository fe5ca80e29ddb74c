"""Limits that no structure meets are refused with their lines, and limits of real structures never."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.restraints.bounds import check_bounds, possible_distances
from fastfold.inference.restraints.distances import restraint_distances
from fastfold.inference.restraints.paths import chain_span
from fastfold.inference.restraints.residues import Residues
from fastfold.inference.restraints.restraint import ATOMS, Restraint
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from tests.conftest import require_shared

SEQUENCES = "MKTAYIAKQRQISFVKSHFSRQ:GSHMAWLPECCG:GSHMAWLPECCG"
RESIDUES = Residues(target_from_sequence(SEQUENCES))
B, C = 22, 34  # first residues of the second and third chain

MEASURED = {
    "CA": (2.8, 3.36, (3.98, 7.47, 10.92, 14.42, 17.78, 21.19)),
    "CB": (3.06, 3.09, (6.34, 9.78, 13.00, 16.25, 19.70, 22.76)),
    "any": (1.25, 1.95, (1.40, 4.91, 8.40, 11.91, 15.24, 18.70)),
}
"""Distances in Å in 220 chains of the PDB, by kind of atoms.

The smallest of neighbours and of other residues, and the 99.99% quantile at 1 to 6 residues along the chain.
"""


def check(*restraints: Restraint) -> None:
    check_bounds(Path("links.csv"), restraints, RESIDUES)


@pytest.mark.parametrize("kind", ATOMS)
def test_possible_distances_hold_those_of_experiments(kind: str) -> None:
    nearest, apart, farthest = MEASURED[kind]
    for separation, measured in enumerate(farthest, 1):
        smallest, largest = possible_distances(Restraint(0, separation, 0, 9, atoms=kind), RESIDUES)
        assert measured <= largest <= 1.2 * measured
        assert smallest <= (nearest if separation == 1 else apart) <= smallest + 0.4
    assert possible_distances(Restraint(0, B, 0, 9, atoms=kind), RESIDUES)[1] == math.inf


def test_glycines_lack_a_side_chain() -> None:
    """CB is CA in them."""
    glycine, serine = (Restraint(B, B + i, 0, 9, atoms="CB") for i in (11, 1))
    assert possible_distances(glycine, RESIDUES)[1] == chain_span(11)
    assert possible_distances(serine, RESIDUES)[1] == pytest.approx(chain_span(1) + 1.6)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (
            Restraint(0, 1, 50, math.inf),
            "min 50 is too large: CA of A:M1 and A:K2 are 4 Å apart or less; lower min",
        ),
        (
            Restraint(0, 1, 2, math.inf, atoms="any"),
            "the closest atoms of A:M1 and A:K2 are 1.5 Å apart or less",
        ),
        (Restraint(0, 5, 24, math.inf), "CA of A:M1 and A:I6 are 19.2 Å apart or less"),
        (
            Restraint(0, 9, 0, 0),
            "max 0 is too small: CA of A:M1 and A:R10 are 3.3 Å apart or more; raise max",
        ),
        (Restraint(0, B, 0, 1, atoms="any"), "the closest atoms of A:M1 and B:G1 are 1.9 Å apart or more"),
        (Restraint(0, B, 0, 2.9, atoms="CB"), "CB of A:M1 and B:G1 are 3 Å apart or more"),
        (Restraint(0, 1, 0, 2.5), "CA of A:M1 and A:K2 are 2.7 Å apart or more"),
    ],
)
def test_impossible_limits_are_refused(one: Restraint, message: str) -> None:
    line = Restraint(one.first, one.second, one.low, one.high, 1.0, "", "line 7", one.atoms)
    with pytest.raises(InputError) as error:
        check(Restraint(2, 12, 0, 8, line="line 2"), line)
    assert "links.csv: has restraints that no structure meets:\nline 7: " in str(error.value)
    assert message in str(error.value)
    assert "line 2" not in str(error.value)


@pytest.mark.parametrize(
    "one",
    [
        Restraint(0, 1, 3.9, math.inf),
        Restraint(0, B, 500, math.inf),
        Restraint(0, B, 1e9, math.inf),
        Restraint(0, B, 0, 2, atoms="any"),
        Restraint(0, 1, 0, 1.3, atoms="any"),
        Restraint(0, 1, 2.9, 3.1),
    ],
)
def test_extreme_limits_are_kept(one: Restraint) -> None:
    check(one)


@pytest.mark.parametrize("kind", ATOMS)
def test_limits_at_the_possible_ones_are_kept_and_those_beyond_refused(kind: str) -> None:
    smallest, largest = possible_distances(Restraint(0, 4, 0, 9, atoms=kind), RESIDUES)
    check(Restraint(0, 4, largest, math.inf, atoms=kind))
    check(Restraint(0, 4, 0, smallest, atoms=kind))
    for low, high in ((math.nextafter(largest, math.inf), math.inf), (0.0, math.nextafter(smallest, 0.0))):
        with pytest.raises(InputError, match="that no structure meets"):
            check(Restraint(0, 4, low, high, atoms=kind))


def near(first: int, second: int, high: float, line: int, **more: str) -> Restraint:
    return Restraint(first, second, 0.0, high, line=f"line {line}", **more)


def far(first: int, second: int, low: float, line: int, **more: str) -> Restraint:
    return Restraint(first, second, low, math.inf, line=f"line {line}", **more)


@pytest.mark.parametrize(
    ("restraints", "message"),
    [
        (
            (far(0, B, 30, 2), near(B, 0, 10, 3)),
            "line 2: min 30 contradicts max 10 of line 3; remove one of them",
        ),
        (
            (near(0, B, 10, 2), near(B, C, 10, 3), far(0, C, 21, 4)),
            "line 4: min 21 is too large: line 2, line 3 and the chain allow 20 Å or less",
        ),
        # 10 Å to residue 10, and 15.2 Å along the chain to residue 14.
        (
            (near(B, 9, 10, 2), far(B, 13, 26, 3)),
            "line 3: min 26 is too large: line 2 and the chain allow 25.2 Å",
        ),
        (
            (near(B, C, 10, 2, atoms="CB"), far(B, C, 13, 3)),  # glycines
            "line 3: min 13 is too large: line 2 and the chain allow 10 Å",
        ),
        (
            (near(B + 1, C + 1, 10, 2, atoms="CB"), far(B + 1, C + 1, 13.3, 3)),
            "line 3: min 13.3 is too large: line 2 and the chain allow 13.2 Å",
        ),
        (
            (near(B + 1, C + 1, 10, 2), far(B + 1, C + 1, 13.3, 3, atoms="CB")),
            "line 3: min 13.3 is too large: line 2 and the chain allow 13.2 Å",
        ),
        (
            (near(0, B, 10, 2), far(0, B, 11, 3, atoms="any")),
            "line 3: min 11 is too large: line 2 and the chain",
        ),
    ],
)
def test_restraints_that_exclude_each_other_are_refused(
    restraints: tuple[Restraint, ...], message: str
) -> None:
    with pytest.raises(InputError) as error:
        check(*restraints)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 2, "one line for each contradiction"


@pytest.mark.parametrize(
    "restraints",
    [
        (near(0, B, 10, 2), near(B, C, 10, 3), far(0, C, 19, 4)),
        (near(B, 9, 10, 2), far(B, 13, 25, 3)),
        (near(B + 1, C + 1, 10, 2, atoms="CB"), far(B + 1, C + 1, 13.1, 3)),
        (near(B + 1, C + 1, 10, 2), far(B + 1, C + 1, 13.1, 3, atoms="CB")),
        (near(B + 1, C + 1, 10, 2, atoms="any"), far(B + 1, C + 1, 14, 3)),
        # One of a group suffices.
        (near(0, B, 10, 2, group="x"), far(0, B, 30, 3, group="x")),
        (near(0, 9, 1, 2, group="x"), near(0, B, 10, 3, group="x")),
        (near(0, B, 10, 2, group="x"), near(1, B, 10, 2, group="x"), near(B, C, 10, 3), far(0, C, 21, 4)),
    ],
)
def test_restraints_that_may_hold_together_are_kept(restraints: tuple[Restraint, ...]) -> None:
    check(*restraints)


def test_a_group_without_a_possible_restraint_is_refused() -> None:
    with pytest.raises(InputError, match="line 2, line 3: max 1 is too small"):
        check(near(0, 9, 1, 2, group="x"), near(0, B, 1.5, 3, group="x"))


@pytest.mark.parametrize("seed", range(40))
def test_contradictions_are_those_of_all_shortest_paths(seed: int) -> None:
    """Against Floyd and Warshall's algorithm on all residues."""
    rng = np.random.default_rng(seed)
    restraints = []
    for line in range(14):
        first, second = sorted(rng.choice(46, 2, replace=False).tolist())
        high = float(rng.uniform(6, 20))
        smallest, largest = possible_distances(Restraint(first, second, 0, high), RESIDUES)
        low = float(rng.uniform(15, 45)) if line % 4 == 0 else 0.0
        if low < largest and high > smallest:
            restraints.append(Restraint(first, second, low, math.inf if low else high, line=f"line {line}"))
    upper = np.full((46, 46), np.inf)
    for first in range(46):
        for second in range(46):
            separation = RESIDUES.separation(first, second)
            if separation is not None:
                upper[first, second] = chain_span(separation)
    for one in restraints:
        a, b = one.first, one.second
        upper[a, b] = upper[b, a] = min(upper[a, b], one.high)
    for middle in range(46):
        upper = np.minimum(upper, upper[:, [middle]] + upper[[middle]])
    contradict = {one.line for one in restraints if one.low > upper[one.first, one.second]}
    try:
        check(*restraints)
        refused: list[str] = []
    except InputError as error:
        refused = [line.partition(":")[0] for line in str(error).splitlines()[1:]]
    assert set(refused) == contradict


@pytest.mark.parametrize("kind", ATOMS)
def test_limits_around_the_distances_of_a_structure_are_kept(kind: str) -> None:
    chain = read_structure(require_shared("data", "2q2k", "2q2k.cif"), chain_ids=["A"]).chains[0]
    whole = [
        i
        for i, one in enumerate(rc.sequence_to_aatype(chain.sequence))
        if (chain.mask[i] >= rc.restype_atom37_mask[one]).all()
    ]
    rng = np.random.default_rng(0)
    drawn = [tuple(rng.choice(whole, 2, replace=False).tolist()) for _ in range(400)]
    types = rc.sequence_to_aatype(chain.sequence)
    pairs = [Restraint(a, b, 0.0, 9.0, atoms=kind) for a, b in drawn]
    distances = restraint_distances(pairs, chain.positions, types)
    restraints = [
        Restraint(one.first, one.second, d - 0.01, d + 0.01, line=f"line {i}", atoms=kind)
        for i, (one, d) in enumerate(zip(pairs, distances.tolist(), strict=True))
    ]
    check_bounds(Path("links.csv"), restraints, Residues(target_from_sequence(chain.sequence)))


def test_more_partners_than_a_protein_has_room_for_are_refused() -> None:
    """A list of scores of all pairs, as of plmDCA, is no list of links; all pairs of a peptide may be near."""
    residues = Residues(target_from_sequence("A" * 100))
    every = [Restraint(i, j, 0, 10, line=f"line {i}") for i in range(100) for j in range(i + 1, 100)]
    with pytest.raises(
        InputError, match=r"A:A1 has 99 partners within 10 Å, where a protein has about 31 residues"
    ):
        check_bounds(Path("scores.csv"), every, residues)
    check_bounds(Path("near.csv"), [one for one in every if one.second - one.first <= 25], residues)
    check_bounds(Path("peptide.csv"), [one for one in every if one.second < 40], residues)
